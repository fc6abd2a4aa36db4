"""The server that `make lab` starts."""

import platform

from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager


class OpensUnchanged(AsyncLargeFileManager):
    """JupyterLab writes into each notebook which Python its kernel has. If the notebook already
    says so, JupyterLab does not call it changed."""

    async def get(self, path, content=True, **options):
        model = await super().get(path, content=content, **options)
        if content and model["type"] == "notebook":
            language = model["content"]["metadata"].get("language_info", {})
            if "version" in language:
                language["version"] = platform.python_version()
        return model


c = get_config()  # noqa: F821
c.LabApp.custom_css = True
c.LabApp.default_url = "/lab/tree/notebooks/00_tree_attention_in_one_sitting.ipynb"
c.ServerApp.contents_manager_class = OpensUnchanged
c.ServerApp.tornado_settings = {"static_custom_path": ["notebooks/.jupyter/custom"]}
