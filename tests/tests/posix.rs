//! What POSIX promises of files, asked of a real mount by small Python programs.

use std::path::Path;

use forebay_tests::settings::skip;
use forebay_tests::{Forebay, Mount, Scratch, Seeded, require_fuse, scale, shell};
use rand::RngExt;

#[path = "posix/data.rs"]
mod data;
#[path = "posix/attributes.rs"]
mod attributes;
#[path = "posix/directories.rs"]
mod directories;
#[path = "posix/removed.rs"]
mod removed;
#[path = "posix/sharing.rs"]
mod sharing;
#[path = "posix/outside.rs"]
mod outside;

/// What every program starts with.
const PRELUDE: &str = r#"
import ctypes, errno, fcntl, mmap, os, stat, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def put(path, content):
    with open(path, "wb") as file:
        file.write(content)

def get(path):
    with open(path, "rb") as file:
        return file.read()

def fails(code, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except OSError as error:
        assert error.errno == code, (errno.errorcode[error.errno], errno.errorcode[code])
    else:
        raise AssertionError(f"did not fail with {errno.errorcode[code]}")

def as_user(uid, gid, call):
    """Runs `call` as another user and returns the errno it failed with, or 0."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
            call()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"#;

/// A mounted empty folder.
struct Walk {
    mount: Mount,
    scratch: Scratch,
}

impl Walk {
    fn new() -> Self {
        Self::over(|_| {})
    }

    /// Over a folder that `fill` puts something into.
    fn over(fill: impl FnOnce(&Path)) -> Self {
        Self::with(&[], fill)
    }

    /// The same with further options.
    fn with(more: &[&str], fill: impl FnOnce(&Path)) -> Self {
        let scratch = Scratch::new();
        let bucket = scratch.folder("bucket");
        fill(&bucket);
        let source = format!("file://{}", bucket.display());
        let options = [&["-o", "suid,dev,allow_other"], more].concat();
        let mount = Mount::new(&scratch.join("home"), &source, &scratch.join("mnt"), &options, &[]);
        Self { scratch, mount }
    }

    /// Runs Python in the mount.
    #[track_caller]
    fn python(&self, script: &str) -> String {
        let file = self.scratch.join("script.py");
        std::fs::write(&file, format!("{PRELUDE}{script}")).expect("the scratch folder is writable");
        shell(self.mount.path(), &format!("python3 {}", file.display())).succeeded()
    }
}
