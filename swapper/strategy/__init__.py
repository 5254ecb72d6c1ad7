"""Shared by the strategies of Lightning and of Fabric: arguments, settings, synchronization of DDP."""
