"""What a schedule says: actions in rows, their stages, and the mistakes that can be found in them."""
