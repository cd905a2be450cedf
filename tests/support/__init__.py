"""What tests share: tiny models, engines, workloads, references and fakes."""
