"""The models that the test bed serves, named to SGLang by SGLANG_EXTERNAL_MODEL_PACKAGE.

Without it SGLang imports every model it knows, which costs each process seconds.
"""
