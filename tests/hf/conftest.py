"""Nothing here may ask the network, in this process or in those that it starts."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
