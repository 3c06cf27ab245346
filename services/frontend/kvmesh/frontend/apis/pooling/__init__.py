"""APIs of models that embed texts or score documents."""
