"""What the Hub tells, takes, and to whom: repos, refs, trees, bytes, commits and pull requests.

Large files come by a signed link to the CDN. The CDN is another origin, as in life: the client then
sees the Hub's own headers, and whether it takes a token along is seen here.
"""

import base64
import json
import re
from datetime import UTC, datetime
from types import SimpleNamespace
from urllib.parse import parse_qs, quote, urlencode

import yaml

from tests.support.hub.folders import in_memory, is_large, pointer
from tests.support.hub.wire import RefusedError, Reply, as_json, refusal


def user_of(hub, request):
    """Return who asks; nobody without a token, and a wrong token is refused."""
    header = request.headers.get("authorization")
    if not header:
        return None
    known = hub.tokens.get(header.removeprefix("Bearer ").strip())
    if not known:
        raise refusal(401, "Invalid credentials in Authorization header")
    name, _, role = known.partition(":")
    return SimpleNamespace(name=name, role=role or "write")


def may_read(repo, user):
    """Say whether a user reads what is private or gated."""
    return user is not None and (user.name == repo.owner or user.name in repo.readers)


def repository_for(hub, request, key):
    """Return the repo if whoever asks may know of it."""
    user = user_of(hub, request)
    repo = hub.repos.get(key)
    if repo is not None and (not repo.private or may_read(repo, user)):
        return repo
    if user is not None:
        raise refusal(404, "Repository not found", "RepoNotFound")
    # The Hub sends no code here. Its client then says RepositoryNotFoundError only if the address
    # begins with https, which ours does not.
    code = None if hub.https_style_401 else "RepoNotFound"
    raise refusal(401, "Invalid username or password.", code)


def known_user(hub, request):
    """Return who asks; nobody is refused."""
    user = user_of(hub, request)
    if user is None:
        raise refusal(401, "Invalid username or password.")
    return user


def writer_of(hub, request):
    """Return who asks if the token may write."""
    user = known_user(hub, request)
    if user.role == "read":
        raise refusal(403, "You don't have the required permissions to perform this action")
    return user


def found_at(hub, request, place):
    """Return the repo and the commit that an address names."""
    repo = repository_for(hub, request, place.repo)
    return repo, commit_for(repo, place.revision)


def commit_for(repo, revision):
    """Return the commit that a revision names."""
    commit = repo.resolve(revision)
    if commit is None:
        raise refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return commit


def whoami(hub, request, place):
    """Say who a token belongs to."""
    user = known_user(hub, request)
    token = {"type": "access_token", "accessToken": {"displayName": "test", "role": user.role}}
    names = {"id": user.name, "name": user.name, "fullname": user.name}
    return as_json({"type": "user", **names, "orgs": [], "auth": token})


def harnesses(hub, request, place):
    """Answer a question the client asks before its first upload."""
    return as_json({"standardEnvVars": [], "harnesses": {}})


def repositories(hub, request, place):
    """List the repos of an author or with a word in their name, page by page."""
    user, query = user_of(hub, request), request.query
    author, word = query.get("author", "").lower(), query.get("search", "").lower()
    found = [
        _summary(repo)
        for repo in hub.repos.values()
        if repo.kind == place.kind
        and (not repo.private or may_read(repo, user))
        and author in ("", repo.owner.lower())
        and word in repo.id.lower()
    ]
    return _page(hub, request, found)


def _summary(repo):
    """Return what every listing says of a repo."""
    said = {"id": repo.id, "author": repo.owner, "private": repo.private, "gated": repo.gated}
    return said | ({"modelId": repo.id} if repo.kind == "model" else {})


def info(hub, request, place):
    """Describe a repo at a revision."""
    repo, commit = found_at(hub, request, place)
    siblings = [{"rfilename": path} for path in sorted(commit.files)]
    return as_json(_summary(repo) | {"sha": commit.id, "siblings": siblings})


def refs(hub, request, place):
    """List branches and tags."""
    repo = repository_for(hub, request, place.repo)
    branches = {n: oid for n, oid in repo.branches.items() if not n.startswith("refs/pr/")}

    def listed(kind, names):
        ref = f"refs/{kind}/"
        return [{"name": n, "ref": ref + n, "targetCommit": oid} for n, oid in names.items()]

    names = {"branches": listed("heads", branches), "tags": listed("tags", repo.tags)}
    return as_json({**names, "converts": []})


def tree(hub, request, place):
    """List the files and folders below a folder."""
    _, commit = found_at(hub, request, place)
    if place.path not in commit.folders:
        text = f'{place.path} does not exist on "{place.revision}"'
        raise refusal(404, text, "EntryNotFound")
    prefix, deep = f"{place.path}/" if place.path else "", request.flag("recursive")
    entries = [
        _entry(commit, path)
        for path in sorted({*commit.files, *commit.folders} - {place.path})
        if path.startswith(prefix) and (deep or "/" not in path[len(prefix) :])
    ]
    return _page(hub, request, entries)


def _entry(commit, path):
    """Return what the tree says of a file or folder."""
    if path in commit.folders:
        return {"type": "directory", "oid": commit.folders[path], "size": 0, "path": path}
    blob = commit.files[path]
    said = {"type": "file", "oid": blob.git_id, "size": blob.nbytes, "path": path}
    if blob.sha256:
        length = len(pointer(blob.sha256, blob.nbytes))
        said["lfs"] = {"oid": blob.sha256, "size": blob.nbytes, "pointerSize": length}
    return said


def paths_info(hub, request, place):
    """Describe the files and folders that are asked for; what is not there is left out."""
    _, commit = found_at(hub, request, place)
    paths = parse_qs(request.body.decode()).get("paths", [])
    known = {*commit.files, *commit.folders}
    wanted = [path.strip("/") for path in paths]
    return as_json([_entry(commit, path) for path in wanted if path in known])


def _page(hub, request, entries):
    """Return the entries behind the cursor and a link to those that follow."""
    start = int(base64.b64decode(request.query.get("cursor", "")) or 0)
    stop, more = start + min(int(request.query.get("limit", hub.page)), hub.page), None
    if stop < len(entries):
        cursor = base64.b64encode(str(stop).encode()).decode()
        query = urlencode(request.query | {"cursor": cursor})
        more = f'<{hub.url}{request.path}?{query}>; rel="next"'
    return as_json(entries[start:stop], headers={"Link": more})


def resolve(hub, request, place):
    """Say where the bytes of a file are and what they must be."""
    repo, blob, head = _file_at(hub, request, place)
    head |= {"X-Linked-Size": blob.nbytes, "X-Linked-ETag": f'"{blob.etag}"'}
    commit = head["X-Repo-Commit"]
    if blob.sha256 is None:
        cache = f"/api/resolve-cache/{place.kind}s/{repo}/{commit}/{quote(place.path)}"
        return Reply(307, b"", head | {"Location": f"{cache}?etag=%22{blob.etag}%22"})
    query = urlencode({"X-Signature": hub.links.sign(), "name": place.path}, quote_via=quote)
    link = f"{hub.cdn}/cdn/{blob.sha256}?{query}"
    return Reply(302, b"", head | {"ETag": f'"{blob.etag}"', "Location": link})


def resolve_cache(hub, request, place):
    """Serve a small file."""
    _, blob, head = _file_at(hub, request, place)
    shown = f"inline; filename*=UTF-8''{quote(place.path.rpartition('/')[2])}"
    head |= {"ETag": f'"{blob.etag}"', "Content-Disposition": shown}
    return _serve(hub, request, blob, head)


def _file_at(hub, request, place):
    """Return the repo's id, the file, and the headers of either answer.

    Of a gated repo, files are for whom it lets in, and the rest is public.
    """
    repo, user = repository_for(hub, request, place.repo), user_of(hub, request)
    if repo.gated and not may_read(repo, user):
        text = f"Access to {repo.kind} {repo.id} is restricted"
        if user is None:
            text += ". You must have access to it and be authenticated to access it. Please log in."
            raise refusal(401, text, "GatedRepo")
        text += f" and you are not in the authorized list. Visit {hub.url}/{repo.key} to ask for it"
        raise refusal(403, text, "GatedRepo")
    commit = commit_for(repo, place.revision)
    head = {"X-Repo-Commit": commit.id, "Accept-Ranges": "bytes"}
    if place.path not in commit.files:
        named = {"X-Error-Message": "Entry not found", "X-Error-Code": "EntryNotFound"}
        raise RefusedError(Reply(404, b"Entry not found", head | named))
    return repo.id, commit.files[place.path], head


class Links:
    """Signed links to the CDN: each answer has its own, and one that has expired stays so."""

    def __init__(self):
        self._count = 0
        self._expired = set()

    def sign(self):
        """Return a signature that was never given before."""
        self._count += 1
        return f"{self._count:06d}"

    def check(self, request):
        """Refuse a link that has expired, as a CDN would: XML, none of the Hub's headers."""
        signature = request.query.get("X-Signature", "")
        if request.fault.get("expired"):
            self._expired.add(signature)
        if not signature or signature in self._expired or int(signature) > self._count:
            text = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
            raise RefusedError(Reply(403, text, {"Content-Type": "application/xml"}))


def download(hub, request, place):
    """Serve a large file to whoever has a link."""
    hub.links.check(request)
    blob = next(r.large[place.path] for r in hub.repos.values() if place.path in r.large)
    return _serve(hub, request, blob, {"ETag": f'"{blob.git_id}"'})  # not the sha256: as in life


def verify(hub, request, place):
    """Take what is said of an upload, which the client sends with its token."""
    return Reply(200, b"{}")


def upload(hub, request, place):
    """Take a large file that a commit will name."""
    blob = in_memory("upload.bin", request.body)
    assert blob.sha256 == place.path
    for repo in hub.repos.values():
        repo.large.setdefault(place.path, blob)
    return Reply(200, b"", {"ETag": '"uploaded"'})


def _serve(hub, request, blob, headers):
    """Return a file or the range of it that is asked for."""
    kind = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
    headers = {**kind, **headers}
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", "").strip())
    ranged, start, stop = found and not request.fault.get("norange"), 0, blob.nbytes
    if found and ranged:
        start, stop = int(found[1]), min(stop, int(found[2] or stop) + 1)
        if start >= blob.nbytes:
            raise RefusedError(Reply(416, b"", {"Content-Range": f"bytes */{blob.nbytes}"}))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{blob.nbytes}"
    stop = min(stop, start + request.fault.get("short", stop))
    headers["Content-Length"] = stop - start
    return Reply(206 if ranged else 200, blob.read(start, stop), headers)


# --------------------------------------------------------------------------------------------------
# What may be written.


def open_discussion(repo, title, user, *, base, status="open"):
    """Open a discussion, or a pull request against a `base`, and return its number."""
    number = len(repo.discussions) + 1
    repo.discussions.append(
        {
            "title": title,
            "num": number,
            "author": {"name": user},
            "createdAt": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z"),
            "status": status,
            "repo": {"name": repo.id, "type": repo.kind},
            "isPullRequest": base is not None,
            "filesWithConflicts": [],
            "changes": {"base": f"refs/heads/{base}"} if base else None,
            "events": [],
        }
    )
    if base:
        repo.branches[f"refs/pr/{number}"] = repo.branches[base]
    return number


def list_all(hub, request, place):
    """List discussions, pull requests, or both."""
    repo, kind = repository_for(hub, request, place.repo), request.query.get("type", "all")
    kinds = {"all": (True, False), "pull_request": (True,)}.get(kind, (False,))
    wanted = [one for one in repo.discussions if one["isPullRequest"] in kinds]
    count = {"count": len(wanted), "start": 0, "numClosedDiscussions": 0}
    return as_json({"discussions": wanted, **count})


def create(hub, request, place):
    """Open what a user asks for."""
    user, repo = writer_of(hub, request).name, repository_for(hub, request, place.repo)
    as_request = bool(request.json.get("pullRequest"))
    base, status = ("main", "draft") if as_request else (None, "open")
    number = open_discussion(repo, request.json["title"], user, base=base, status=status)
    return as_json({"num": number, "pullRequest": as_request})


def details(hub, request, place):
    """Return one discussion with everything that happened in it."""
    repo = repository_for(hub, request, place.repo)
    return as_json({**repo.discussions[int(place.number) - 1], "diff": ""})


def merge(hub, request, place):
    """Move main to a pull request's head."""
    repo = repository_for(hub, request, place.repo)
    assert writer_of(hub, request).name == repo.owner
    head = repo.branches["main"] = repo.branches[f"refs/pr/{place.number}"]
    found = repo.discussions[int(place.number) - 1]
    found["status"], found["changes"]["mergeCommitId"] = "merged", head
    return as_json({})


def validate_yaml(hub, request, place):
    """Read the metadata with which a card begins."""
    found = re.match(r"\s*---\s*\n(.*?)\n---\s*(\n|$)", request.json["content"], re.S)
    assert found and isinstance(yaml.safe_load(found[1]), dict)
    return as_json({"errors": [], "warnings": []})


def preupload(hub, request, place):
    """Say which files go into the commit and which to the CDN first."""
    writer_of(hub, request)
    _, commit = found_at(hub, request, place)
    files = []
    for path, nbytes in ((file["path"], file["size"]) for file in request.json["files"]):
        mode = "lfs" if is_large(path, nbytes) else "regular"
        known = {"oid": commit.files[path].etag} if path in commit.files else {}
        files.append({"path": path, "shouldIgnore": False, "uploadMode": mode, **known})
    return as_json({"files": files})


def lfs_batch(hub, request, place):
    """Say where large files are to be uploaded; what is there already needs no upload."""
    writer_of(hub, request)
    repo = repository_for(hub, request, place.repo)
    objects = []
    for wanted in request.json["objects"]:
        said = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] not in repo.large:
            link = {"href": f"{hub.cdn}/cdn/upload/{wanted['oid']}", "header": {}}
            verify = {"href": f"{hub.cdn}/cdn/verify", "header": {}}
            said["actions"] = {"upload": link, "verify": verify}
        objects.append(said)
    kind = {"Content-Type": "application/vnd.git-lfs+json"}
    return as_json({"transfer": "basic", "objects": objects}, headers=kind)


def create_commit(hub, request, place):
    """Add a commit to a branch, to an own pull request, or as a new one."""
    user, repo = writer_of(hub, request).name, repository_for(hub, request, place.repo)
    lines = [json.loads(line) for line in request.body.splitlines() if line.strip()]
    head = next(line["value"] for line in lines if line["key"] == "header")
    as_request = request.flag("create_pr")
    parent, wanted = commit_for(repo, place.revision), head.get("parentCommit")
    if wanted and not parent.id.startswith(wanted):
        if not as_request:
            raise refusal(412, "A commit has happened since. Please refresh and try again.")
        parent = commit_for(repo, wanted)
    number = re.fullmatch(r"refs/pr/(\d+)", place.revision)
    author = repo.discussions[int(number[1]) - 1]["author"]["name"] if number else repo.owner
    if not as_request and user not in (author, repo.owner):
        text = "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request"
        raise refusal(403, text)
    files = _changed(repo, parent, lines)
    title, branch, said = head["summary"], place.revision, {}
    if as_request:
        opened = open_discussion(repo, title, user, base=place.revision)
        branch = f"refs/pr/{opened}"
        said["pullRequestUrl"] = f"{hub.url}/{repo.key}/discussions/{opened}"
    new = repo.commit(files, title, parent=parent.id, branch=branch)
    link = f"{hub.url}/{repo.key}/commit/{new.id}"
    said |= {"commitOid": new.id, "commitUrl": link, "hookOutput": ""}
    return as_json({"success": True, **said})


def _changed(repo, parent, lines):
    """Return the parent's files after the operations of a commit."""
    files = dict(parent.files)
    for key, value in ((line["key"], line["value"]) for line in lines):
        if key == "file":
            data = base64.b64decode(value["content"])
            files[value["path"]] = in_memory(value["path"], data)
        elif key == "lfsFile":
            files[value["path"]] = repo.large[value["oid"]]
        elif key == "deletedFile":
            del files[value["path"]]
    return files
