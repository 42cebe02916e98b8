"""Starting runs on machines that are rented: TPU VMs, Kubernetes, Slurm."""
