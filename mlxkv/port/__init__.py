"""The thing under test: Llama and its cache on MLX. It knows no plan, no trace and no judge."""
