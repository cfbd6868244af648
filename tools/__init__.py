"""Tools for those who develop and measure megatron_balance; no part of the installed package."""
