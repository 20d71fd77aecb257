"""Adapters that plug the store into serving engines: the only code that knows an engine exists.

``sglang`` holds the class that SGLang loads; importing it imports SGLang. What it needs of an engine's
pools, model and options is told apart in modules of their own, which import neither SGLang nor torch.
"""
