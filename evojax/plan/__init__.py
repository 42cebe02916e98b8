"""What a configuration needs of a machine, before one is rented: memory, arithmetic, programs."""
