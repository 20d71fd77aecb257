"""The contract suite, the oracle and the fault tools, shipped for implementers of connectors."""
