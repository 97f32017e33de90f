//! The file-system layer without a kernel: what the kernel's own part of each call does, and the requests that it sends
//! (`requests.rs`).
//!
//! Paths are walked, symlinks followed and descriptors kept here, as the kernel does; every question of what a file
//! system holds is a request, with what fuser would hand over. Requests come from root, who passes every check.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_core::{Attributes, FileKind, InodeId};
use forebay_fuse::fs::{Caller, Change, FileSystem, OpenFlags, Policy};
use forebay_fuse::{Errno, FsResult, Handle};
use forebay_io::clock::Clock;
use forebay_volume::{Volume, VolumeSettings, connect};
use tokio::runtime::Runtime;

#[path = "requests.rs"]
mod requests;

use super::calls::Called;

/// Root, with the usual umask.
const CALLER: Caller = Caller { uid: 0, gid: 0, umask: 0o022 };
/// Whose descriptors all are.
const OWNER: u64 = 1;
/// Symlinks that the kernel follows in one walk.
const MOST_LINKS: usize = 40;
/// Largest READ and WRITE.
const REQUEST_BYTES: usize = 1 << 20;

/// A file system of its own over a volume of a folder.
pub(crate) struct Layer {
    runtime: Runtime,
    source: String,
    /// Whether files leave for the store while they are written.
    early: bool,
    fs: Arc<FileSystem>,
    volume: Arc<Volume>,
    open: HashMap<usize, Descriptor>,
    opened: usize,
    /// What the last call was told of and the kernel would forget soon.
    references: Vec<InodeId>,
    mapped: Option<Mapped>,
}

/// What is mapped: a descriptor, and which bytes of it.
#[derive(Debug, Clone, Copy)]
struct Mapped {
    file: usize,
    offset: u64,
    length: u64,
}

impl Mapped {
    /// Bytes from `at` on that a file of `size` has.
    fn room(self, at: usize, size: u64) -> usize {
        self.length.min(size.saturating_sub(self.offset)).saturating_sub(at as u64) as usize
    }
}

#[derive(Debug, Clone, Copy)]
struct Descriptor {
    ino: InodeId,
    handle: Handle,
    folder: bool,
    flags: i32,
}

impl Descriptor {
    fn reads(self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_WRONLY
    }

    fn writes(self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_RDONLY
    }
}

/// Where a walk ended: a name in a directory, and what it names.
struct Place {
    parent: InodeId,
    name: Vec<u8>,
    found: Option<Attributes>,
}

/// Listings expire at once and are not waited for, so that they come between and beside all steps.
async fn assemble(source: &str, home: &Path, early: bool) -> (Arc<FileSystem>, Arc<Volume>) {
    let mut settings = VolumeSettings { state_directory: home.to_owned(), ..VolumeSettings::default() };
    (settings.import.ttl_ms, settings.import.relist_wait_ms) = (0, 0);
    if early {
        settings.write.buffer_bytes = 64 << 10;
    }
    let appearance = settings.import.appearance();
    let volume = connect(source, settings).await.expect("a volume");
    let policy = Policy { dataset: false, ttl: Policy::LIVE_TTL, relatime: false, appearance };
    (Arc::new(FileSystem::new(volume.clone(), policy, Clock::system())), volume)
}

impl Layer {
    /// Over the volume that `source` names, with its state below `home`. Files leave for the store `early`, if they are to.
    pub(crate) fn new(source: &str, home: &Path, early: bool) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let (fs, volume) = runtime.block_on(assemble(source, home, early));
        let (open, references, mapped) = (HashMap::new(), Vec::new(), None);
        Self { runtime, source: source.to_owned(), early, fs, volume, open, opened: 0, references, mapped }
    }

    /// Ends as a mount does, with nothing open, and begins anew.
    pub(crate) fn reopen(&mut self, home: &Path) {
        self.end();
        (self.fs, self.volume) = self.runtime.block_on(assemble(&self.source, home, self.early));
    }

    /// Ends as a mount does, with nothing open.
    pub(crate) fn end(&mut self) {
        let seen = self.references.clone();
        self.forget();
        assert_eq!(self.fs.open_handles(), 0, "everything was released");
        assert!(seen.iter().all(|ino| self.fs.lookups(*ino) == 0), "everything was forgotten");
        self.runtime.block_on(async {
            self.fs.release_all().await;
            self.volume.close().await.expect("the volume closes");
        });
    }

    /// Answers a request.
    fn ask<T>(&self, request: impl Future<Output = FsResult<T>>) -> Called<T> {
        self.runtime.block_on(request).map_err(|errno| errno.0)
    }

    fn forget(&mut self) {
        for ino in std::mem::take(&mut self.references) {
            if let Some(rest) = self.fs.forget(ino, 1) {
                self.runtime.block_on(rest);
            }
        }
    }

    fn noted(&mut self, attributes: Attributes) -> Attributes {
        self.references.push(attributes.ino);
        attributes
    }

    fn lookup(&mut self, parent: InodeId, name: &[u8]) -> Called<Option<Attributes>> {
        let found = self.ask(self.fs.lookup(parent, name))?;
        Ok(found.map(|found| self.noted(found)))
    }

    /// Walks to `path`; `follow` a symlink at its end, too.
    fn walk(&mut self, path: &Path, follow: bool) -> Called<Place> {
        self.forget();
        let mut rest: VecDeque<OsString> = path.iter().map(OsString::from).collect();
        let (mut parent, mut links) = (InodeId::ROOT, 0);
        while let Some(name) = rest.pop_front() {
            let name = name.into_vec();
            let found = self.lookup(parent, &name)?;
            let last = rest.is_empty();
            match found {
                Some(link) if link.kind == FileKind::Symlink && (follow || !last) => {
                    links += 1;
                    if links > MOST_LINKS {
                        return Err(libc::ELOOP);
                    }
                    let target = self.ask(self.fs.read_link(link.ino))?;
                    let target = PathBuf::from(OsString::from_vec(target.to_vec()));
                    for part in target.iter().rev() {
                        rest.push_front(part.to_owned());
                    }
                }
                found if last => return Ok(Place { parent, name, found }),
                None => return Err(libc::ENOENT),
                Some(folder) if folder.kind == FileKind::Directory => parent = folder.ino,
                Some(_) => return Err(libc::ENOTDIR),
            }
        }
        let found = Some(self.ask(self.fs.attributes(InodeId::ROOT))?);
        Ok(Place { parent, name: Vec::new(), found })
    }

    /// What is at `path`.
    fn find(&mut self, path: &Path, follow: bool) -> Called<Attributes> {
        self.walk(path, follow)?.found.ok_or(libc::ENOENT)
    }

    fn at(&self, file: usize) -> Descriptor {
        self.open[&file]
    }

    /// Whether `folder` is `top` or lies below it.
    fn is_below(&self, mut folder: InodeId, top: InodeId) -> Called<bool> {
        while folder != top && folder != InodeId::ROOT {
            let parent = self.runtime.block_on(self.volume.tree().parent(folder));
            folder = parent.map_err(|failure| Errno::from(failure).0)?;
        }
        Ok(folder == top)
    }

    fn change(&self, ino: InodeId, change: Change) -> Called<()> {
        self.ask(self.fs.set_attributes(ino, change, true)).map(drop)
    }

    /// A descriptor, which holds the reference to its inode that the call took.
    fn keep(&mut self, descriptor: Descriptor) -> usize {
        let at = self.references.iter().rposition(|ino| *ino == descriptor.ino);
        self.references.remove(at.expect("what is opened was looked up"));
        self.opened += 1;
        self.open.insert(self.opened, descriptor);
        self.opened
    }

    fn open_found(&mut self, found: &Attributes, flags: i32) -> Called<Descriptor> {
        let descriptor = Descriptor { ino: found.ino, handle: Handle::NONE, folder: false, flags };
        let has = |flag: i32| flags & flag != 0;
        match found.kind {
            _ if has(libc::O_CREAT) && has(libc::O_EXCL) => Err(libc::EEXIST),
            FileKind::Symlink if has(libc::O_DIRECTORY) => Err(libc::ENOTDIR),
            FileKind::Symlink => Err(libc::ELOOP),
            FileKind::CharDevice | FileKind::BlockDevice if !has(libc::O_DIRECTORY) => Err(libc::EACCES),
            FileKind::Socket if !has(libc::O_DIRECTORY) => Err(libc::ENXIO),
            FileKind::Directory if has(libc::O_CREAT | libc::O_TRUNC) || descriptor.writes() => {
                Err(libc::EISDIR)
            }
            FileKind::Directory if has(libc::O_DIRECT) => Err(libc::EINVAL),
            FileKind::Directory => {
                let handle = self.fs.open_directory().map_err(|errno| errno.0)?;
                Ok(Descriptor { handle, folder: true, ..descriptor })
            }
            _ if has(libc::O_DIRECTORY) => Err(libc::ENOTDIR),
            FileKind::File => {
                let sent = OpenFlags(flags & !(libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC));
                let handle = self.ask(self.fs.open(found.ino, sent))?.handle;
                if has(libc::O_TRUNC) {
                    self.change(found.ino, Change { size: Some(0), ..Change::default() })?;
                }
                Ok(Descriptor { handle, ..descriptor })
            }
            _ if flags & libc::O_ACCMODE == libc::O_WRONLY => Err(libc::ENXIO),
            _ if has(libc::O_DIRECT) => Err(libc::EINVAL),
            _ => Err(libc::ESPIPE),
        }
    }

    /// user.* is for files and directories: what the kernel says of others.
    fn check_name(found: &Attributes, name: &str, refused: i32) -> Called<()> {
        let fits = matches!(found.kind, FileKind::File | FileKind::Directory);
        if name.starts_with("user.") && !fits { Err(refused) } else { Ok(()) }
    }
}
