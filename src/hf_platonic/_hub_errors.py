"""What the Hub's client raises, as `HubError` with the remedy, and without tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import HubError, PlatonicError

__all__ = ["REMEDIES", "explain"]

_TOKENS = re.compile(r"hf_(?:[A-Za-z0-9]{16,}|(?:oauth|jwt)_[\w.~+/=-]+)|(?<=Bearer )[^\s'\"]+")
REMEDIES = {
    "unauthorized": "the Hub wants a valid token, or there's no such repo. Check the name, then log in with "
    "`hf auth login` or pass `token=`.",
    "gated": "access is granted on request, and this account doesn't have it. Ask for it on the repo's page, then log "
    "in with `hf auth login` or pass `token=`.",
    "forbidden": "this token doesn't allow it. Use one with the right permission for this repo, or push with "
    "create_pr=True.",
    "repo_not_found": "there's no such repo, or it's private and this token can't see it. Check the name and whether "
    "it's a model or a data set, or use another token.",
    "revision_not_found": "the repo has no such branch, tag or commit. Check `revision`, or leave it out for main.",
    "file_not_found": "the repo has no such file there. Check `subfolder` and `revision`, and that the repo holds "
    "this kind of object.",
    "offline": "it needs the Hub, and HF_HUB_OFFLINE is set. Unset it.",
    "not_cached": "it isn't whole in the cache, and the Hub isn't asked offline. Pull it once online, without "
    "local_files_only or HF_HUB_OFFLINE, into the same cache.",
    "timeout": "the Hub didn't answer in time. Try again, or allow more seconds with HF_HUB_ETAG_TIMEOUT and "
    "HF_HUB_DOWNLOAD_TIMEOUT.",
    "unreachable": "the connection failed or broke off. Check the network, proxies and HF_ENDPOINT and try again.",
    "server": "the Hub failed. Try again later; https://status.huggingface.co tells its state.",
    "rate_limited": "the Hub got too many requests. Wait, or log in for a higher limit.",
    "conflict": "it changed meanwhile. Push again.",
    "invalid_id": "that isn't a repo id. Pass an existing folder, or an id like 'user/name'.",
    "rejected": "the Hub or the client refused the request.",
}
"""By `HubError.kind`, how its message goes on."""


@contextmanager
def explain(what: str, *, token: str | bool | None = None) -> Iterator[None]:
    """Turns the client's exceptions into `HubError`, the original kept as the cause and freed of tokens.

    Args:
        what: The subject of the message, e.g. "model 'user/name'".
        token: The token in use, to be kept out of every message.

    Raises:
        HubError: For what the client raises; other exceptions pass.
    """
    try:
        yield
    except PlatonicError:
        raise
    except Exception as error:
        links = _scrubbed_chain(error, token)
        for link in links:
            if (kind := _kind(link)) is not None:
                status = getattr(getattr(link, "response", None), "status_code", None)
                said = getattr(link, "server_message", None) or str(link).strip() or type(link).__name__
                number = f" ({status})" if status else ""
                message = f"Can't use {what}{number}: {REMEDIES[kind]} It said: {said.splitlines()[0]:.300}"
                raise HubError(message, kind=kind, status=status) from error
        raise


def _scrubbed_chain(error: BaseException, token: str | bool | None) -> list[BaseException]:
    """The exception and its causes, with tokens taken out of their texts and of those of their contexts."""
    from huggingface_hub import get_token

    secrets = [secret for secret in (token, get_token()) if isinstance(secret, str) and secret.strip()]
    secrets += [secret.strip() for secret in secrets]

    def scrub(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "***")
        return _TOKENS.sub("***", text)

    links, waiting, causes = [], [error], [error]
    while waiting:
        link = waiting.pop()
        if link in links:
            continue
        links.append(link)
        link.args = tuple(scrub(value) if isinstance(value, str) else value for value in link.args)
        if isinstance(getattr(link, "server_message", None), str):
            link.server_message = scrub(link.server_message)  # type: ignore[attr-defined]
        waiting += [other for other in (link.__cause__, link.__context__) if other is not None]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return causes


def _kind(error: BaseException) -> str | None:
    """What went wrong, as `HubError.kind`; None if this link of the chain doesn't tell."""
    from huggingface_hub import errors

    if isinstance(error, errors.RevisionNotFoundError):
        return "revision_not_found"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return "file_not_found"
    if isinstance(error, errors.GatedRepoError):
        return "gated"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "unauthorized" if error.response.status_code == 401 else "repo_not_found"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        told = {401: "unauthorized", 403: "forbidden", 408: "timeout", 409: "conflict", 412: "conflict"}
        return "server" if status >= 500 else {**told, 429: "rate_limited"}.get(status, "rejected")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "offline"
    if isinstance(error, errors.LocalTokenNotFoundError):
        return "unauthorized"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return None if error.__cause__ is not None else "not_cached"
    # By name: which HTTP library the client uses has changed before, and hf_xet may be missing.
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"LocalProtocolError", "UnicodeEncodeError", "XetAuthenticationError"}:
        return "unauthorized"  # the first two: a token that can't be sent in a header, such as one with a line break
    if names & {"TimeoutException", "TimeoutError"}:
        return "timeout"
    broke_off = isinstance(error, OSError) and str(error).startswith("Consistency check failed")
    return "unreachable" if names & {"TransportError", "ConnectionError"} or broke_off else None
