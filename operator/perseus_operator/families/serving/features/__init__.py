"""What is known of a pool: each folder is one feature, and imports only those below it."""
