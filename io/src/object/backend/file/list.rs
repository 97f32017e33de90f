//! Listing a directory in key order.

use std::fs::{DirEntry, Metadata};
use std::io;
use std::path::PathBuf;

use object_store::Result;

use super::{Inner, STAGING, io_error, object_meta};
use crate::object::key::{address, is_segment};
use crate::object::progress::Progress;
use crate::object::request::{ListRequest, Page};

/// Entries of one page. Each page reads the directories on its way again, so pages are large.
const PAGE_ENTRIES: usize = 50_000;

/// Names between two words of progress: a page of a large directory takes longer than a store may be silent.
const STEP: usize = 1000;

/// One page being filled.
struct Walk<'a> {
    list: &'a ListRequest,
    after: &'a str,
    limit: usize,
    page: Page,
    /// Names and files looked at.
    steps: usize,
    progress: Option<Progress>,
}

/// Something found in a directory, with a slash at the end of its sort name if it is one, so that names sort as keys.
struct Found {
    sort_name: String,
    /// That of a link's target. A file's own is looked up when the page takes it: of a large directory, most pages take
    /// few of the names that they read.
    metadata: Option<Metadata>,
}

impl Inner {
    /// A page of a listing, `progress` of which is told to whoever waits for it.
    pub(super) fn list(&self, list: &ListRequest, progress: Option<Progress>) -> Result<Page> {
        let after = list.token.as_deref().or(list.after.as_deref()).unwrap_or("");
        let limit = list.limit.unwrap_or(PAGE_ENTRIES).clamp(1, PAGE_ENTRIES);
        let mut walk = Walk { list, after, limit, page: Page::default(), steps: 0, progress };
        walk.directory(self.root.join(&list.prefix), &list.prefix)?;
        // Of a root that went away, perhaps in the middle of this, nobody is to be told that what is missing is not there:
        // all that was known of it would be forgotten.
        std::fs::metadata(&self.root).map_err(|error| unreadable("", error))?;
        Ok(walk.page)
    }
}

impl Walk<'_> {
    /// Lists what lies in `directory`, whose keys start with `prefix`.
    fn directory(&mut self, directory: PathBuf, prefix: &str) -> Result<()> {
        for entry in self.read(&directory).map_err(|error| unreadable(prefix, error))? {
            if self.page.next.is_some() {
                return Ok(());
            }
            self.step();
            self.take(&directory, prefix, entry)?;
        }
        Ok(())
    }

    /// What lies in `directory`, in the order of keys.
    fn read(&mut self, directory: &std::path::Path) -> io::Result<Vec<Found>> {
        let mut found = Vec::new();
        let entries = match std::fs::read_dir(directory) {
            Ok(entries) => entries,
            // Gone meanwhile, or never there: no keys.
            Err(error) if is_absent(&error) => return Ok(found),
            Err(error) => return Err(error),
        };
        for entry in entries {
            self.step();
            found.extend(self.look_at(&entry?)?);
        }
        found.sort_unstable_by(|a, b| a.sort_name.cmp(&b.sort_name));
        Ok(found)
    }

    fn step(&mut self) {
        self.steps += 1;
        if self.steps.is_multiple_of(STEP)
            && let Some(progress) = &self.progress
        {
            progress.tell();
        }
    }

    fn look_at(&mut self, entry: &DirEntry) -> io::Result<Option<Found>> {
        let name = entry.file_name();
        let shown = || Some(name.to_string_lossy().into_owned());
        let Some(name) = name.to_str().filter(|name| is_segment(name)) else {
            self.page.skipped.note(shown());
            return Ok(None);
        };
        let kind = entry.file_type()?;
        if kind.is_file() || kind.is_dir() {
            let sort_name = if kind.is_dir() { format!("{name}/") } else { name.to_owned() };
            return Ok(Some(Found { sort_name, metadata: None }));
        }
        // Pipes, devices, and links to directories, which may loop, are no objects.
        let target = match kind.is_symlink().then(|| std::fs::metadata(entry.path())) {
            Some(Err(error)) if is_absent(&error) => return Ok(None),
            target => target.transpose()?.filter(Metadata::is_file),
        };
        if target.is_none() {
            self.page.skipped.note(shown());
        }
        Ok(target.map(|target| Found { sort_name: name.to_owned(), metadata: Some(target) }))
    }

    fn take(&mut self, directory: &std::path::Path, prefix: &str, entry: Found) -> Result<()> {
        let key = format!("{prefix}{}", entry.sort_name);
        let Some(name) = entry.sort_name.strip_suffix('/') else {
            if key.as_str() > self.after
                && let Some(location) = address(&key)
                && let Some(metadata) = entry
                    .metadata
                    .map_or_else(|| look_up(&directory.join(&entry.sort_name)), |known| Ok(Some(known)))
                    .map_err(|error| unreadable(&key, error))?
            {
                self.page.objects.push(object_meta(location, &metadata));
                self.end_page(key);
            }
            return Ok(());
        };
        let may_hold_more = !self.list.delimited && self.after.starts_with(&key);
        let is_passed = key.as_str() <= self.after && !may_hold_more;
        if is_passed || key.trim_end_matches('/') == STAGING {
            return Ok(());
        }
        if self.list.delimited {
            // A folder that holds nothing but the staging folder holds no key.
            if key == ".forebay/" {
                let entries = std::fs::read_dir(directory.join(name));
                if entries.map_err(|error| unreadable(&key, error))?.count() <= 1 {
                    return Ok(());
                }
            }
            self.page.directories.push(name.to_owned());
            self.end_page(key);
            return Ok(());
        }
        self.directory(directory.join(name), &key)
    }

    fn end_page(&mut self, last: String) {
        if self.page.objects.len() + self.page.directories.len() >= self.limit {
            self.page.next = Some(last);
        }
    }
}

/// What a file is; `None` when it is gone, or none any more.
fn look_up(path: &std::path::Path) -> io::Result<Option<Metadata>> {
    match std::fs::symlink_metadata(path) {
        Err(error) if is_absent(&error) => Ok(None),
        found => found.map(|found| Some(found).filter(Metadata::is_file)),
    }
}

/// Names what could not be read. To leave it out would make what is in it vanish.
fn unreadable(key: &str, error: io::Error) -> object_store::Error {
    let key = key.trim_end_matches('/');
    let path = address(key).unwrap_or_default();
    match error.kind() {
        // These are told with their path.
        io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound => io_error(&path, error),
        _ if key.is_empty() => io_error(&path, error),
        kind => io_error(&path, io::Error::new(kind, format!("{key}: {error}"))),
    }
}

fn is_absent(error: &io::Error) -> bool {
    let is_loop = error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error());
    is_loop || matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use futures::future::FutureExt;
    use futures::stream::TryStreamExt;

    use super::*;
    use crate::object::backend::file::Directory;
    use crate::object::request::{Reply, Request, Service};
    use crate::object::{Bucket, BucketUrl, Condition, StoreSettings};
    use forebay_core::{ErrorKind, ObjectKey};

    /// Of a folder that cannot be read, in a listing of all below, nothing told which it was.
    #[tokio::test]
    async fn a_folder_that_cannot_be_read_is_named_and_no_key_is_left_out() {
        use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat};
        let folder = tempfile::tempdir().expect("scratch");
        // Deeper than a path may be long: the superuser may read everything else.
        let name = "n".repeat(255);
        let mut deepest = openat(CWD, folder.path(), OFlags::DIRECTORY, Mode::empty()).expect("open");
        for name in std::iter::once("deep").chain(std::iter::repeat_n(name.as_str(), 16)) {
            mkdirat(&deepest, name, Mode::RWXU).expect("a folder");
            deepest = openat(&deepest, name, OFlags::DIRECTORY, Mode::empty()).expect("open");
        }
        let url: BucketUrl = format!("file://{}", folder.path().display()).parse().expect("a URL");
        let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("a bucket");
        let listed = bucket.list("").try_collect::<Vec<_>>().await.expect_err("not all can be read");
        assert!(listed.to_string().contains("deep/nnn"), "{listed}");
        assert_eq!(bucket.list_directory("").await.expect("one level").directories, ["deep"]);
    }

    /// Whoever follows what others do to a bucket forgot all that lay in it, its owners and modes included, while it was moved away
    /// or not mounted.
    #[tokio::test]
    async fn a_root_that_went_away_is_not_empty() {
        let folder = tempfile::tempdir().expect("scratch");
        let (root, elsewhere) = (folder.path().join("bucket"), folder.path().join("elsewhere"));
        std::fs::create_dir_all(root.join("d")).expect("a folder");
        std::fs::write(root.join("d/f"), "bytes").expect("a file");
        let url: BucketUrl = format!("file://{}", root.display()).parse().expect("a URL");
        let settings = StoreSettings { deadline_ms: 50, ..StoreSettings::default() };
        let bucket = Bucket::open(&url, &settings).await.expect("a bucket");
        assert!(bucket.list_directory("not/there").await.expect("a listing").objects.is_empty());
        std::fs::rename(&root, &elsewhere).expect("moved away");
        for prefix in ["", "d", "not/there"] {
            let error = bucket.list_directory(prefix).await.expect_err("nobody knows what is in it");
            assert!(error.to_string().contains(&url.to_string()), "{prefix}: {error}");
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{prefix}: {error}");
        }
        let key = ObjectKey::new("d/f");
        let failed = [
            bucket.put(&key, "new".into(), Condition::Always).await.map(drop),
            bucket.get_whole(&key).await.map(drop),
            bucket.head(&key).await.map(drop),
            bucket.delete(&key).await,
        ];
        for error in failed.map(|failed| failed.expect_err("nor what is at a key")) {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(error.hint().is_some_and(|hint| hint.contains("mount again")), "{error}");
        }
        std::fs::rename(&elsewhere, &root).expect("moved back");
        assert_eq!(bucket.list_directory("d").await.expect("a listing").objects.len(), 1);
    }

    /// It was moved away in the middle of a page: the files of the second half were forgotten.
    #[tokio::test]
    async fn a_root_that_goes_away_while_it_is_listed_gives_no_part_for_the_whole() {
        let folder = tempfile::tempdir().expect("scratch");
        let (root, elsewhere) = (folder.path().join("bucket"), folder.path().join("elsewhere"));
        ["a", "b"].iter().for_each(|name| std::fs::create_dir_all(root.join(name)).expect("a folder"));
        std::fs::write(root.join("a/first"), "bytes").expect("a file");
        // So many that it is moved while they are looked at, of which a page tells.
        let names = 8 * STEP;
        (0..names).for_each(|name| drop(std::fs::File::create(root.join(format!("b/{name}")))));
        let progress = Progress::default();
        let directory = Directory::new(root.clone());
        let list = progress.watch(directory.call(Request::List(ListRequest::default())));
        let move_away = async {
            progress.made().await;
            std::fs::rename(&root, &elsewhere).expect("moved away");
        };
        match tokio::join!(list, move_away).0 {
            Ok(Reply::Page(page)) => assert_eq!(page.objects.len(), 1 + names, "it was listed before"),
            listed => {
                assert!(listed.is_err_and(|error| error.to_string().contains("directory is not there")))
            }
        }
    }

    /// A listing of a million names on a busy disk takes longer than a store may be silent.
    #[tokio::test]
    async fn whoever_waits_for_a_large_listing_hears_of_it() {
        let folder = tempfile::tempdir().expect("scratch");
        let list = async |names: usize| {
            (0..names).for_each(|name| drop(std::fs::File::create(folder.path().join(name.to_string()))));
            let (progress, request) =
                (Progress::default(), ListRequest { delimited: true, ..Default::default() });
            let directory = Directory::new(folder.path().to_owned());
            let reply = progress.watch(directory.call(Request::List(request))).await.expect("a listing");
            let Reply::Page(page) = reply else { panic!("a page") };
            (page.objects.len(), progress.made().now_or_never().is_some())
        };
        assert_eq!(list(400).await, (400, false));
        assert_eq!(list(1500).await, (1500, true));
    }
}
