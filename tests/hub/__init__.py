# ruff: noqa
"""fakehub - the smallest local Hugging Face Hub that the real huggingface_hub 2.x client accepts.

One file, pure ASGI, only `uvicorn` to run it.  Local folders are served as git-like revisions: every git id
(blob, LFS pointer blob, tree, commit) is computed as git itself would.

    ROOT/<namespace>/<name>/<revision folder>/...files      one folder = one commit on main, oldest first (natural
                                                            order); each is also a tag called as the folder; main = last
    ROOT/<namespace>/<name>/repo.json                       optional: {"private": bool, "gated": false|"auto"|"manual",
                                                            "readers": [user], "branch_per_revision": bool, "xet": bool}

    python fakehub.py ROOT --port 8765 --token hf_alice=alice:write
    HF_ENDPOINT=http://127.0.0.1:8765 python your_program.py

In a test:   with Hub(root, tokens=...).running() as hub:  HfApi(endpoint=hub.url) ...;  hub.faults.append({...}); hub.log
"""

from __future__ import annotations

import asyncio, base64, binascii, contextlib, gzip, hashlib, json, re, socket, struct, threading, time, uuid
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlencode

LFS_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".onnx",
    ".npz",
    ".h5",
    ".msgpack",
    ".ckpt",
    ".parquet",
)
LFS_MIN_SIZE = 10 * 1024 * 1024
CHUNK = 256 * 1024


def natural(s: str):
    return [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", s)]


def git_id(kind: str, data: bytes) -> str:
    return hashlib.sha1(b"%s %d\0" % (kind.encode(), len(data)) + data).hexdigest()


# ----------------------------------------------------------------------------------------------- git-like store
@dataclass(frozen=True)
class Blob:
    oid: str  # git id of the content, or of the LFS pointer
    size: int  # real size
    source: object  # Path or bytes
    sha256: str | None = None  # set for LFS files

    @property
    def etag(self):
        return self.sha256 or self.oid

    @property
    def pointer_size(self):
        return len(pointer(self.sha256, self.size))

    @property
    def xet_hash(self):  # not a real xet hash, only 64 hex digits of the right shape
        return hashlib.sha256(b"xet" + self.etag.encode()).hexdigest()

    def read(self, start=0, end=None):
        """Yield the bytes [start, end) in chunks."""
        end = self.size if end is None else end
        if isinstance(self.source, bytes):
            for i in range(start, end, CHUNK):
                yield self.source[i : min(i + CHUNK, end)]
            return
        with open(self.source, "rb") as f:
            f.seek(start)
            left = end - start
            while left > 0 and (b := f.read(min(CHUNK, left))):
                left -= len(b)
                yield b


def pointer(sha256: str, size: int) -> bytes:
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    )


def make_blob(name: str, source) -> Blob:
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    if name.endswith(LFS_SUFFIXES) or size >= LFS_MIN_SIZE:
        h = hashlib.sha256()
        for b in Blob("", size, source).read():
            h.update(b)
        return Blob(git_id("blob", pointer(h.hexdigest(), size)), size, source, h.hexdigest())
    data = source if isinstance(source, bytes) else source.read_bytes()
    return Blob(git_id("blob", data), size, source)


@dataclass
class Commit:
    oid: str
    files: dict[str, Blob]
    dirs: dict[str, str]  # folder -> git tree id ("" is the root)
    title: str
    message: str
    date: datetime
    parent: str | None
    author: str


def make_commit(files, title, message, date, parent, author) -> Commit:
    dirs: dict[str, str] = {}

    def tree(prefix: str) -> str:
        names: dict[str, str | None] = {}
        for p in files:
            if p.startswith(prefix):
                head, _, rest = p[len(prefix) :].partition("/")
                names[head] = None if rest else p
        out = b""
        for n in sorted(names, key=lambda n: (n if names[n] else n + "/").encode()):
            if names[n]:
                out += b"100644 " + n.encode() + b"\0" + bytes.fromhex(files[names[n]].oid)
            else:
                out += b"40000 " + n.encode() + b"\0" + bytes.fromhex(tree(prefix + n + "/"))
        dirs[prefix.rstrip("/")] = oid = git_id("tree", out)
        return oid

    who = f"{author} <{author}@fakehub> {int(date.timestamp())} +0000"
    body = f"tree {tree('')}\n" + (f"parent {parent}\n" if parent else "")
    body += (
        f"author {who}\ncommitter {who}\n\n{title}" + (f"\n\n{message}" if message else "") + "\n"
    )
    return Commit(
        git_id("commit", body.encode()), dict(files), dirs, title, message, date, parent, author
    )


@dataclass
class Repo:
    id: str
    private: bool = False
    gated: object = False
    readers: tuple = ()
    xet: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    prs: list[dict] = field(default_factory=list)  # discussions and pull requests, num = index + 1
    blobs: dict[str, Blob] = field(default_factory=dict)  # LFS objects by sha256

    def commit(
        self, files, title, message="", date=None, parent=None, author="fakehub", branch="main"
    ) -> Commit:
        date = date or datetime.now(timezone.utc)
        c = make_commit(files, title, message, date, parent or self.branches.get(branch), author)
        self.commits[c.oid] = c
        self.branches[branch] = c.oid
        self.blobs.update({b.sha256: b for b in files.values() if b.sha256})
        return c

    def resolve(self, rev: str) -> Commit | None:
        oid = self.branches.get(rev) or self.tags.get(rev) or (rev if rev in self.commits else None)
        if oid is None and re.fullmatch(r"[0-9a-f]{7,39}", rev):
            oid = next((o for o in self.commits if o.startswith(rev)), None)
        return self.commits.get(oid)

    def history(self, c: Commit | None):
        while c:
            yield c
            c = self.commits.get(c.parent)


# ------------------------------------------------------------------------------------------------------- server
class Reply(Exception):
    """Raised by a handler to answer at once."""

    def __init__(self, status, body=b"", headers=None, code=None, message=None):
        self.status, self.headers = status, dict(headers or {})
        if message is not None:
            self.headers["X-Error-Message"] = message
            body = {"error": message}
        if code:
            self.headers["X-Error-Code"] = code
        if isinstance(body, (dict, list)):
            body = json.dumps(body).encode()
            self.headers.setdefault("Content-Type", "application/json; charset=utf-8")
        self.body = body


class Req:
    def __init__(self, scope, body, send):
        self.method, self.scope, self.body, self.send = scope["method"], scope, body, send
        self.raw = (
            scope["raw_path"].decode().partition("?")[0]
        )  # NOT scope["path"]: "refs%2Fpr%2F1" must stay whole
        self.seg = [unquote(s) for s in self.raw.strip("/").split("/")]
        self.headers = {k.decode().lower(): v.decode("latin-1") for k, v in scope["headers"]}
        self.query = {
            k: v[-1]
            for k, v in parse_qs(scope["query_string"].decode(), keep_blank_values=True).items()
        }
        self.port = (scope.get("server") or ("", 0))[1]

    def json(self):
        return json.loads(self.body or b"{}")

    def flag(self, name):
        return str(self.query.get(name, "")).lower() in ("1", "true")


class Hub:
    def __init__(
        self, root=None, tokens=None, page=1000, quota=None, gzip_text=False, https_style_401=False
    ):
        self.repos: dict[str, Repo] = {}
        self.tokens = tokens or {}  # token -> "user" or "user:read" (default is write)
        self.page = page  # entries per page of tree/ and commits/ listings
        self.quota = quota or {}  # {"api": (requests, window seconds), "resolvers": (...)}
        self.gzip_text = gzip_text  # serve text files compressed and chunked, as the real Hub does
        self.https_style_401 = (
            https_style_401  # real wire shape: no X-Error-Code on an anonymous 401
        )
        self.faults: list[dict] = []  # see _fault()
        self.log: list[dict] = []  # one entry per request
        self.leaks: list[str] = []  # CDN requests which carried an Authorization header
        self.url = self.cdn = ""
        self._windows: dict[str, list] = {}
        if root:
            self.load(Path(root))

    # ---- filling
    def load(self, root: Path):
        for ns in sorted(p for p in root.iterdir() if p.is_dir()):
            for d in sorted(p for p in ns.iterdir() if p.is_dir()):
                self.add_folder(f"{ns.name}/{d.name}", d)

    def add_folder(self, repo_id: str, d: Path) -> Repo:
        cfg = json.loads((d / "repo.json").read_text()) if (d / "repo.json").exists() else {}
        repo = self.repos[repo_id] = Repo(
            repo_id,
            cfg.get("private", False),
            cfg.get("gated", False),
            tuple(cfg.get("readers", ())),
            cfg.get("xet", False),
        )
        revs = sorted((p for p in d.iterdir() if p.is_dir()), key=lambda p: natural(p.name))
        date = datetime(2026, 1, 1, tzinfo=timezone.utc)
        attributes = "".join(
            f"*{s} filter=lfs diff=lfs merge=lfs -text\n" for s in LFS_SUFFIXES
        ).encode()
        base = {".gitattributes": make_blob(".gitattributes", attributes)}
        repo.commit(base, "initial commit", date=date, author="system")
        for i, rev in enumerate(revs):
            files = dict(base)
            for p in sorted(rev.rglob("*")):
                if p.is_file():
                    files[p.relative_to(rev).as_posix()] = make_blob(p.name, p)
            c = repo.commit(files, f"checkpoint {rev.name}", date=date + timedelta(hours=i + 1))
            (repo.branches if cfg.get("branch_per_revision") else repo.tags)[rev.name] = c.oid
        return repo

    # ---- running
    @contextlib.contextmanager
    def running(self, port=0):
        import uvicorn

        socks = []
        for p in (port, port + 1 if port else 0):  # second port plays the CDN: another origin
            s = socket.socket()
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", p))
            socks.append(s)
        self.url, self.cdn = (f"http://127.0.0.1:{s.getsockname()[1]}" for s in socks)
        self.cdn_port = socks[1].getsockname()[1]
        server = uvicorn.Server(
            uvicorn.Config(
                self,
                log_level="critical",
                lifespan="off",
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        t = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=socks)), daemon=True)
        t.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield self
        finally:
            server.should_exit = True
            t.join(10)

    # ---- ASGI
    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = b""
        while True:
            m = await receive()
            body += m.get("body", b"")
            if not m.get("more_body"):
                break
        req = Req(scope, body, send)
        entry = {
            "t": time.time(),
            "method": req.method,
            "path": req.raw,
            "query": scope["query_string"].decode(),
            "range": req.headers.get("range"),
            "auth": "authorization" in req.headers,
            "status": None,
            "sent": 0,
            "cdn": req.port == getattr(self, "cdn_port", -1),
            "ua": req.headers.get("user-agent"),
        }
        self.log.append(entry)
        req.entry, req.fault = entry, self._fault(req)
        limit = {}
        try:
            if d := req.fault.get("delay"):
                await asyncio.sleep(d)
            if "reset" in req.fault and req.fault["reset"] == 0:
                return self._reset(send)
            limit = self._limit(req)
            if "status" in req.fault:
                raise Reply(
                    req.fault["status"],
                    req.fault.get("body", {"error": "injected fault"}),
                    req.fault.get("headers"),
                )
            await self.route(req)
            raise Reply(404, message="Sorry, we can't find the page you are looking for.")
        except Reply as r:
            await self.reply(req, r, limit)

    async def reply(self, req, r: Reply, extra=None):
        body = r.body
        headers = {"X-Request-Id": "Root=" + uuid.uuid4().hex, **(extra or {}), **r.headers}
        if isinstance(body, bytes):
            headers.setdefault("Content-Length", str(len(body)))
        req.entry["status"] = r.status
        await req.send(
            {
                "type": "http.response.start",
                "status": r.status,
                "headers": [
                    (k.lower().encode(), str(v).encode("latin-1")) for k, v in headers.items()
                ],
            }
        )
        if req.method == "HEAD" or isinstance(body, bytes):
            data = b"" if req.method == "HEAD" else body
            req.entry["sent"] += len(data)
            return await req.send({"type": "http.response.body", "body": data})
        f, sent = req.fault, 0
        for b in body:  # streamed file
            if "flip" in f and sent <= f["flip"] < sent + len(b):  # one wrong byte, size unchanged
                i = f["flip"] - sent
                b = b[:i] + bytes([b[i] ^ 0xFF]) + b[i + 1 :]
            stop = min([f[k] for k in ("cut", "reset", "stall") if k in f], default=None)
            if stop is not None and sent + len(b) > stop:
                b = b[: stop - sent]
            if b:
                await req.send({"type": "http.response.body", "body": b, "more_body": True})
                sent += len(b)
                req.entry["sent"] = sent
            if "rate" in f:
                await asyncio.sleep(len(b) / f["rate"])
            if stop is not None and sent >= stop:
                if "stall" in f:
                    await asyncio.sleep(f.get("stall_for", 3600))
                if "reset" in f:
                    await asyncio.sleep(0.2)
                    self._reset(req.send)
                return  # uvicorn closes: body cut short
        await req.send({"type": "http.response.body", "body": b""})

    @staticmethod
    def _reset(send):
        """TCP RST (uvicorn only): the client sees a connection reset, not a clean close."""
        transport = send.__self__.transport
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        transport.abort()

    def _fault(self, req) -> dict:
        """First matching rule: {"match": regex on "METHOD /path", "times": n, and any of
        status+headers+body | delay: s | cut: n bytes then close | reset: n bytes then RST | stall: n bytes then silence |
        rate: bytes/s | short: announce and send only n bytes | flip: offset of a corrupted byte | norange: ignore Range}"""
        for f in self.faults:
            if f.get("times", 1) > 0 and re.search(f["match"], f"{req.method} {req.raw}"):
                f["times"] = f.get("times", 10**9) - 1
                return f
        return {}

    def _limit(self, req) -> dict:
        bucket = "resolvers" if "resolve" in req.raw else "api"
        if bucket not in self.quota or req.entry["cdn"] or req.seg[0] == "_fakehub":
            return {}
        q, w = self.quota[bucket]
        win = self._windows.setdefault(bucket, [time.time(), 0])
        if time.time() - win[0] >= w:
            win[:] = [time.time(), 0]
        win[1] += 1
        left, reset = q - win[1], max(0, int(win[0] + w - time.time()) + 1)
        headers = {
            "RateLimit": f'"{bucket}";r={max(0, left)};t={reset}',
            "RateLimit-Policy": f'"fixed window";"{bucket}";q={q};w={w}',
        }
        if left < 0:
            raise Reply(429, headers=headers, message="We had to rate limit your IP.")
        return headers

    # ---- access
    def user(self, req) -> tuple[str | None, str]:
        h = req.headers.get("authorization")
        if not h:
            return None, ""
        known = self.tokens.get(h.removeprefix("Bearer ").strip())
        if not known:
            raise Reply(401, message="Invalid credentials in Authorization header")
        name, _, role = known.partition(":")
        return name, role or "write"

    def repo(self, req, repo_id, content=False, write=False) -> Repo:
        """content=True: the bytes of files (closed for gated repos); metadata of gated repos is public."""
        user, role = self.user(req)
        r = self.repos.get(repo_id)
        owner = user is not None and user == repo_id.split("/")[0]
        allowed = bool(r) and (owner or user in r.readers)
        if r is None or (r.private and not allowed):
            if (
                user is None
            ):  # the real Hub sends no X-Error-Code here; its client then needs an https:// URL to
                raise Reply(
                    401,
                    code=None
                    if self.https_style_401
                    else "RepoNotFound",  # say RepositoryNotFoundError
                    message="Invalid username or password.",
                )
            raise Reply(404, code="RepoNotFound", message="Repository not found")
        if content and r.gated and not allowed:
            if user is None:
                raise Reply(
                    401,
                    code="GatedRepo",
                    message=f"Access to model {r.id} is restricted. You must have access "
                    "to it and be authenticated to access it. Please log in.",
                )
            raise Reply(
                403,
                code="GatedRepo",
                message=f"Access to model {r.id} is restricted and you are not in the "
                f"authorized list. Visit {self.url}/{r.id} to ask for access.",
            )
        if write:
            if user is None:
                raise Reply(401, message="Invalid username or password.")
            if role == "read":
                raise Reply(
                    403, message="You don't have the required permissions to perform this action"
                )
        return r

    def rev(self, repo, rev) -> Commit:
        c = repo.resolve(rev)
        if c is None:
            raise Reply(404, code="RevisionNotFound", message=f"Invalid rev id: {rev}")
        return c

    # ---- routes
    async def route(self, req):
        s, m = req.seg, req.method
        if s[0] == "cdn":
            return self.serve_cdn(req)
        if s[0] == "_fakehub":
            return self.control(req)
        if s[0] != "api":
            if len(s) > 4 and s[2] == "resolve" and m in ("GET", "HEAD"):
                return self.resolve(req, f"{s[0]}/{s[1]}", s[3], "/".join(s[4:]))
            if (
                len(s) == 6
                and s[1].endswith(".git")
                and s[2:] == ["info", "lfs", "objects", "batch"]
            ):
                return self.lfs_batch(req, f"{s[0]}/{s[1][:-4]}")
            return
        s = s[1:]
        if s == ["whoami-v2"]:
            user, role = self.user(req)
            if user is None:
                raise Reply(401, message="Invalid username or password.")
            raise Reply(
                200,
                {
                    "type": "user",
                    "id": user,
                    "name": user,
                    "fullname": user,
                    "orgs": [],
                    "auth": {
                        "type": "access_token",
                        "accessToken": {"displayName": "t", "role": role},
                    },
                },
            )
        if s == ["validate-yaml"]:
            return self.validate_yaml(req)
        if s == ["agent-harnesses"]:
            raise Reply(200, {"standardEnvVars": [], "harnesses": {}})
        if s[:2] == ["resolve-cache", "models"] and len(s) > 5:
            return self.resolve(req, f"{s[2]}/{s[3]}", s[4], "/".join(s[5:]), cache=True)
        if s == ["models"]:
            raise Reply(
                200,
                [{"id": r.id, "private": r.private} for r in self.repos.values() if not r.private],
            )
        if s[0] != "models" or len(s) < 3:
            return
        rid, verb, rest = f"{s[1]}/{s[2]}", (s[3] if len(s) > 3 else None), s[4:]
        if verb is None or verb == "revision":
            return self.info(req, rid, rest[0] if rest else "main")
        if verb == "refs":
            return self.refs(req, rid)
        if verb == "commits":
            return self.commits(req, rid, rest[0])
        if verb == "tree":
            return self.tree(req, rid, rest[0], "/".join(rest[1:]))
        if verb == "paths-info":
            return self.paths_info(req, rid, rest[0])
        if verb == "auth-check":
            self.repo(req, rid, content=True)
            raise Reply(200, {})
        if verb == "preupload":
            return self.preupload(req, rid, rest[0])
        if verb == "commit":
            return self.create_commit(req, rid, rest[0])
        if verb == "discussions":
            return self.discussions(req, rid, rest)

    def meta(self, repo, path, b: Blob):
        e = {"type": "file", "oid": b.oid, "size": b.size, "path": path}
        if b.sha256:
            e["lfs"] = {"oid": b.sha256, "size": b.size, "pointerSize": b.pointer_size}
            if repo.xet:
                e["xetHash"] = b.xet_hash
        return e

    def info(self, req, rid, rev):
        r = self.repo(req, rid)
        c = self.rev(r, rev)
        siblings = []
        for p, b in sorted(c.files.items()):
            e = {"rfilename": p}
            if req.flag("blobs"):
                e |= {"blobId": b.oid, "size": b.size}
                if b.sha256:
                    e["lfs"] = {"sha256": b.sha256, "size": b.size, "pointerSize": b.pointer_size}
            siblings.append(e)
        first = list(r.history(c))[-1]
        d = {
            "_id": hashlib.md5(rid.encode()).hexdigest()[:24],
            "id": rid,
            "modelId": rid,
            "author": rid.split("/")[0],
            "sha": c.oid,
            "lastModified": iso(c.date),
            "createdAt": iso(first.date),
            "private": r.private,
            "gated": r.gated,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": ["safetensors"],
            "siblings": siblings,
            "usedStorage": sum(b.size for b in r.blobs.values()),
        }
        if b := c.files.get("config.json"):
            d["config"] = {
                k: v
                for k, v in json.loads(b"".join(b.read())).items()
                if k in ("architectures", "model_type")
            }
        if b := c.files.get("README.md"):
            d["cardData"] = front_matter(b"".join(b.read()).decode())
            if d["cardData"] and "model-index" in d["cardData"]:
                d["model-index"] = d["cardData"]["model-index"]
        raise Reply(200, d)

    def refs(self, req, rid):
        r = self.repo(req, rid)

        def one(kind, d, keep):
            return [
                {
                    "name": n.split("/")[-1] if n.startswith("refs/") else n,
                    "ref": n if n.startswith("refs/") else f"refs/{kind}/{n}",
                    "targetCommit": o,
                }
                for n, o in d.items()
                if keep(n)
            ]

        out = {
            "branches": one("heads", r.branches, lambda n: not n.startswith("refs/")),
            "converts": [],
            "tags": one("tags", r.tags, lambda n: True),
        }
        if req.query.get("include_prs"):
            out["pullRequests"] = one("pr", r.branches, lambda n: n.startswith("refs/pr/"))
        raise Reply(200, out)

    def paged(self, req, items, param):
        start = (
            int(req.query.get(param) or 0)
            if param == "p"
            else int(base64.b64decode(req.query.get("cursor", "") or b"MA==") or 0)
        )
        first, last = (
            (start * self.page, (start + 1) * self.page)
            if param == "p"
            else (start, start + self.page)
        )
        headers = {"X-Total-Count": len(items)} if param == "p" else {}
        if last < len(items):
            nxt = {
                **req.query,
                param: start + 1 if param == "p" else base64.b64encode(str(last).encode()).decode(),
            }
            headers["Link"] = f'<{self.url}{req.raw}?{urlencode(nxt)}>; rel="next"'
        raise Reply(200, items[first:last], headers)

    def commits(self, req, rid, rev):
        r = self.repo(
            req, rid, content=True
        )  # seen on the real Hub: commits of a gated repo are closed
        items = [
            {
                "id": c.oid,
                "title": c.title,
                "message": c.message,
                "authors": [{"user": c.author, "avatar": ""}],
                "date": iso(c.date),
            }
            for c in r.history(self.rev(r, rev))
        ]
        self.paged(req, items, "p")

    def tree(self, req, rid, rev, path):
        r = self.repo(req, rid)
        c = self.rev(r, rev)
        if path not in c.dirs:
            raise Reply(404, code="EntryNotFound", message=f'{path} does not exist on "{rev}"')
        prefix, deep = path + "/" if path else "", req.flag("recursive")
        last = lambda: (
            {"lastCommit": {"id": c.oid, "title": c.title, "date": iso(c.date)}}
            if req.flag("expand")
            else {}
        )
        items = [
            {"type": "directory", "oid": o, "size": 0, "path": d, **last()}
            for d, o in c.dirs.items()
            if d and d.startswith(prefix) and d != path and (deep or "/" not in d[len(prefix) :])
        ]
        items += [
            {**self.meta(r, p, b), **last()}
            for p, b in c.files.items()
            if p.startswith(prefix) and (deep or "/" not in p[len(prefix) :])
        ]
        self.paged(req, sorted(items, key=lambda e: e["path"]), "cursor")

    def paths_info(self, req, rid, rev):
        r = self.repo(req, rid)
        c = self.rev(r, rev)
        if "json" in req.headers.get("content-type", ""):
            paths = req.json()["paths"]
        else:
            paths = parse_qs(req.body.decode()).get("paths", [])
        out = []
        for p in (p.strip("/") for p in paths):
            if p in c.files:
                out.append(self.meta(r, p, c.files[p]))
            elif p in c.dirs:
                out.append({"type": "directory", "oid": c.dirs[p], "size": 0, "path": p})
        raise Reply(200, out)

    def resolve(self, req, rid, rev, path, cache=False):
        r = self.repo(req, rid, content=True)
        c = self.rev(r, rev)
        head = {"X-Repo-Commit": c.oid, "Accept-Ranges": "bytes"}
        b = c.files.get(path)
        if b is None:
            raise Reply(
                404,
                b"Entry not found",
                {**head, "X-Error-Message": "Entry not found"},
                code="EntryNotFound",
            )
        if cache:
            return self.serve(
                req, b, {**head, "ETag": f'"{b.etag}"', "Content-Disposition": disposition(path)}
            )
        head |= {"X-Linked-Size": b.size, "X-Linked-ETag": f'"{b.etag}"'}
        if b.sha256:
            if r.xet:
                head["X-Xet-Hash"] = b.xet_hash
                head["Link"] = (
                    f'<{self.url}/api/models/{rid}/xet-read-token/{c.oid}>; rel="xet-auth"'
                )
            raise Reply(
                302,
                headers={
                    **head,
                    "ETag": f'"{b.etag}"',
                    "Location": f"{self.cdn}/cdn/{b.sha256}?X-Signature=fake&name={quote(path)}",
                },
            )
        raise Reply(
            307,
            headers={
                **head,
                "Location": f"/api/resolve-cache/models/{rid}/{c.oid}/{quote(path)}?etag=%22{b.etag}%22",
            },
        )

    def serve_cdn(self, req):
        if "authorization" in req.headers:
            self.leaks.append(req.raw)
        if req.seg[1] == "upload":
            b = make_blob("x.bin", req.body)
            if b.sha256 != req.seg[2]:
                raise Reply(400, message="sha256 mismatch")
            for r in self.repos.values():
                r.blobs.setdefault(b.sha256, b)
            raise Reply(200, headers={"ETag": '"up"'})
        b = next((r.blobs[req.seg[1]] for r in self.repos.values() if req.seg[1] in r.blobs), None)
        if b is None:
            raise Reply(404, b"NoSuchKey")
        self.serve(req, b, {"ETag": f'"{b.xet_hash}"'})  # as seen on the real CDN: not the sha256

    def serve(self, req, b: Blob, headers):
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}
        start, end, status = 0, b.size, 200
        m = re.fullmatch(r"bytes=(\d*)-(\d*)", req.headers.get("range", "").strip())
        if m and any(m.groups()) and not req.fault.get("norange"):
            if m[1]:
                start, end = int(m[1]), min(b.size, int(m[2]) + 1 if m[2] else b.size)
            else:
                start = max(0, b.size - int(m[2]))
            if start >= b.size:
                raise Reply(416, headers={"Content-Range": f"bytes */{b.size}"})
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{b.size}"
        if "short" in req.fault:
            end = min(end, start + req.fault["short"])
        if (
            self.gzip_text
            and status == 200
            and req.method == "GET"
            and not b.sha256
            and "gzip" in req.headers.get("accept-encoding", "")
        ):
            raise Reply(
                200,
                iter([gzip.compress(b"".join(b.read()))]),
                {**headers, "Content-Encoding": "gzip"},
            )
        headers["Content-Length"] = end - start
        raise Reply(status, b.read(start, end), headers)

    # ---- writing
    def validate_yaml(self, req):
        try:
            front_matter(req.json()["content"])
        except Exception as e:
            raise Reply(400, {"errors": [{"message": str(e)}], "warnings": []})
        raise Reply(200, {"errors": [], "warnings": []})

    def preupload(self, req, rid, rev):
        r = self.repo(req, rid, write=True)
        c = self.rev(r, rev)
        raise Reply(
            200,
            {
                "files": [
                    {
                        "path": f["path"],
                        "shouldIgnore": False,
                        "uploadMode": "lfs"
                        if f["path"].endswith(LFS_SUFFIXES) or f["size"] >= LFS_MIN_SIZE
                        else "regular",
                        **({"oid": c.files[f["path"]].etag} if f["path"] in c.files else {}),
                    }
                    for f in req.json()["files"]
                ]
            },
        )

    def lfs_batch(self, req, rid):
        r = self.repo(req, rid, write=True)
        raise Reply(
            200,
            {
                "transfer": "basic",
                "objects": [
                    {
                        "oid": o["oid"],
                        "size": o["size"],
                        **(
                            {}
                            if o["oid"] in r.blobs
                            else {
                                "actions": {
                                    "upload": {
                                        "href": f"{self.cdn}/cdn/upload/{o['oid']}",
                                        "header": {},
                                    }
                                }
                            }
                        ),
                    }
                    for o in req.json()["objects"]
                ],
            },
            {"Content-Type": "application/vnd.git-lfs+json"},
        )

    def create_commit(self, req, rid, rev):
        r = self.repo(req, rid, write=True)
        user, _ = self.user(req)
        lines = [json.loads(x) for x in req.body.splitlines() if x.strip()]
        head = next(x["value"] for x in lines if x["key"] == "header")
        c, pr = self.rev(r, rev), req.flag("create_pr")
        want = head.get("parentCommit")
        if want and not c.oid.startswith(want):
            if not pr:
                raise Reply(
                    412, message="A commit has happened since. Please refresh and try again."
                )
            c = self.rev(r, want)
        own_pr = (m := re.fullmatch(r"refs/pr/(\d+)", rev)) and r.prs[int(m[1]) - 1]["author"][
            "name"
        ] == user
        if not pr and not own_pr and user != rid.split("/")[0]:
            raise Reply(
                403,
                message="Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request",
            )
        files = dict(c.files)
        for x in lines:
            v = x["value"]
            if x["key"] == "file":
                files[v["path"]] = make_blob(v["path"], base64.b64decode(v["content"]))
            elif x["key"] == "lfsFile":
                if v["oid"] not in r.blobs:
                    raise Reply(400, message=f"LFS object {v['oid']} is missing")
                files[v["path"]] = r.blobs[v["oid"]]
            elif x["key"] == "deletedFile":
                if files.pop(v["path"], None) is None:
                    raise Reply(
                        404, code="EntryNotFound", message="A file with this name doesn't exist"
                    )
            elif x["key"] == "deletedFolder":
                files = {
                    p: b for p, b in files.items() if not p.startswith(v["path"].rstrip("/") + "/")
                }
        branch, out = rev, {}
        if pr:
            num = self.open_discussion(
                r, head["summary"], head.get("description", ""), user, True, rev, "open"
            )
            branch = f"refs/pr/{num}"
            out["pullRequestUrl"] = f"{self.url}/{rid}/discussions/{num}"
        new = r.commit(
            files,
            head["summary"],
            head.get("description", ""),
            parent=c.oid,
            author=user,
            branch=branch,
        )
        if m := re.fullmatch(r"refs/pr/(\d+)", branch):
            r.prs[int(m[1]) - 1]["events"].append(
                self.event("commit", user, subject=head["summary"], oid=new.oid)
            )
        raise Reply(
            200,
            {
                "success": True,
                "commitOid": new.oid,
                "commitUrl": f"{self.url}/{rid}/commit/{new.oid}",
                "hookOutput": "",
                **out,
            },
        )

    def event(self, kind, user, **data):
        return {
            "id": uuid.uuid4().hex[:24],
            "type": kind,
            "createdAt": iso(datetime.now(timezone.utc)),
            "author": {"name": user},
            "data": data,
        }

    def open_discussion(self, r, title, text, user, is_pr, base="main", status="open"):
        num = len(r.prs) + 1
        now = iso(datetime.now(timezone.utc))
        r.prs.append(
            {
                "title": title,
                "num": num,
                "author": {"name": user},
                "createdAt": now,
                "status": status,
                "repo": {"name": r.id, "type": "model"},
                "isPullRequest": is_pr,
                "filesWithConflicts": [],
                "changes": {"base": f"refs/heads/{base}"} if is_pr else None,
                "events": [
                    self.event(
                        "comment",
                        user,
                        latest={
                            "raw": text,
                            "html": text,
                            "updatedAt": now,
                            "author": {"name": user},
                        },
                        edited=False,
                        hidden=False,
                    )
                ],
            }
        )
        if is_pr:
            r.branches[f"refs/pr/{num}"] = r.branches[base]
        return num

    def discussions(self, req, rid, rest):
        r = self.repo(req, rid, write=req.method == "POST")
        user, _ = self.user(req)
        if not rest and req.method == "GET":
            kind = req.query.get("type", "all")
            ds = [
                d for d in r.prs if kind == "all" or d["isPullRequest"] == (kind == "pull_request")
            ]
            raise Reply(
                200, {"discussions": ds, "count": len(ds), "start": 0, "numClosedDiscussions": 0}
            )
        if not rest:
            b = req.json()
            num = self.open_discussion(
                r,
                b["title"],
                b.get("description", ""),
                user,
                bool(b.get("pullRequest")),
                status="draft" if b.get("pullRequest") else "open",
            )
            raise Reply(200, {"num": num, "pullRequest": bool(b.get("pullRequest"))})
        if not rest[0].isdigit() or not 0 < int(rest[0]) <= len(r.prs):
            raise Reply(404, message="Discussion not found")
        d = r.prs[int(rest[0]) - 1]
        if len(rest) == 1:
            raise Reply(200, {**d, "diff": ""})
        if rest[1] == "comment":
            text = req.json()["comment"]
            now = iso(datetime.now(timezone.utc))
            e = self.event(
                "comment",
                user,
                latest={"raw": text, "html": text, "updatedAt": now, "author": {"name": user}},
                edited=False,
                hidden=False,
            )
            d["events"].append(e)
            raise Reply(200, {"newMessage": e})
        if rest[1] == "status":
            d["status"] = req.json()["status"]
            e = self.event("status-change", user, status=d["status"])
            d["events"].append(e)
            raise Reply(200, {"newStatus": e})
        if rest[1] == "merge":
            if user != rid.split("/")[0]:
                raise Reply(403, message="Forbidden")
            head = r.branches[f"refs/pr/{d['num']}"]
            r.branches["main"] = head
            d["status"], d["changes"]["mergeCommitId"] = "merged", head
            raise Reply(200, {})

    # ---- for tests in another process
    def control(self, req):
        if req.seg[1] == "faults":
            self.faults[:] = req.json()
        if req.seg[1] == "log":
            log = list(self.log)
            if req.flag("clear"):
                self.log.clear()
            raise Reply(200, [e for e in log if not e["path"].startswith("/_fakehub")])
        raise Reply(200, {"faults": self.faults, "leaks": self.leaks})


def iso(d: datetime) -> str:
    return d.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def disposition(path):
    name = path.split("/")[-1]
    return f"inline; filename*=UTF-8''{quote(name)}; filename=\"{name}\";"


def front_matter(text: str) -> dict:
    m = re.match(r"\s*---\s*\n(.*?)\n---\s*(\n|$)", text, re.S)
    if not m:
        return {}
    import yaml  # a dependency of huggingface_hub, so present in every test environment

    d = yaml.safe_load(m[1])
    if not isinstance(d, dict):
        raise ValueError("metadata must be a mapping")
    return d


if __name__ == "__main__":
    import argparse

    ap = argparse.ArgumentParser()
    ap.add_argument("root")
    ap.add_argument("--port", type=int, default=8765)
    ap.add_argument("--page", type=int, default=1000)
    ap.add_argument("--token", action="append", default=[], metavar="TOKEN=USER[:read|write]")
    ap.add_argument("--faults", default="[]", help="JSON list, see Hub._fault")
    ap.add_argument("--gzip", action="store_true")
    a = ap.parse_args()
    hub = Hub(a.root, dict(t.split("=", 1) for t in a.token), page=a.page, gzip_text=a.gzip)
    hub.faults = json.loads(a.faults)
    with hub.running(a.port):
        print(f"HF_ENDPOINT={hub.url}  (CDN {hub.cdn})  repos: {', '.join(hub.repos)}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
