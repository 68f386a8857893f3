"""SGLang's side: what lives inside a scheduler process. Thin: it names pages and asks the node of this host."""
