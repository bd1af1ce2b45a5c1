"""Submit each part as a Job of the Hugging Face Hub; evidence comes back in a bucket."""

import sys

from huggingface_hub import Volume, run_job


def submit(bucket: str, parts: int, flavor: str = "h200") -> list[str]:
    """Submit parts, each with a mount of the bucket in which `qaudit plan` left its folder."""
    return [
        run_job(
            image="IMAGE",
            command=["qaudit", "part", "/out", "--part", f"{number}/{parts}"],
            flavor=flavor,
            timeout="6h",
            attempts=3,
            volumes=[Volume(type="bucket", source=bucket, mount_path="/out")],
        ).id
        for number in range(parts)
    ]


if __name__ == "__main__":
    print("\n".join(submit(sys.argv[1], int(sys.argv[2]))))
