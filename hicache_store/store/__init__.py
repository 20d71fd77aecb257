"""The store: pages of KV in canonical objects over a connector."""
