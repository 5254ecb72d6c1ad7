"""What the strategies of Lightning and of Fabric share."""
