"""Pretrain a GPT model: `torchrun --nproc-per-node N pretrain.py CONFIG [section.key=value ...]`.

Validates the config before torch is imported; a mistake exits with code 2.
"""

from megatron_fp8.commands.train import main

# Workers that are spawned import this file.
if __name__ == "__main__":
    main()
