"""What the machine offers: its GPUs, their memory and their driver."""
