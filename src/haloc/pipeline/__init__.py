"""The whole flow, from a trained network to a deployable one, in stages that can be stopped, edited and continued."""
