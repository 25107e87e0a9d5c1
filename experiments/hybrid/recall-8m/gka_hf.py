from gka.hf import GkaConfig, GkaForCausalLM  # noqa: F401
