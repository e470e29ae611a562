"""The strict float64 forward of a Llama, in torch."""
