"""The CPU reference: torch and transformers follow a plan, a strict float64 forward says what is true."""
