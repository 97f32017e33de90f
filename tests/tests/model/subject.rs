//! What is compared, and how a difference is found and made short.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use forebay_tests::meta::{Meta, join_secret};
use forebay_tests::{Forebay, Mount, Scratch, shrink};

use super::calls::{Answer, Program, Tree, differences};
use super::layer::Layer;
use super::operation::Operation;
use super::syscalls::{Folder, Tmpfs};

/// Runs that a failure may be played again to be made shorter.
pub(crate) const MOST_REPLAYS: usize = 200;
/// Longest that any call may take: a few deadlines of the store, of 30 s each, one after another.
const DEADLINE: Duration = Duration::from_secs(150);

/// What is compared with a tmpfs.
pub(crate) trait Subject {
    fn name(&self) -> &'static str;
    /// Whether there is anything to compare.
    fn takes(&self, _operation: &Operation) -> bool {
        true
    }
    fn apply(&mut self, operation: &Operation) -> Answer;
    fn tree(&mut self) -> Tree;
    /// Goes on elsewhere with what it stored.
    fn move_on(&mut self);
    fn end(&mut self);
}

/// A mount, of a bucket or prefix that was empty.
pub(crate) struct Mounted {
    program: Program<Folder>,
    mount: Mount,
    scratch: Scratch,
    moves: usize,
    /// Of one whose directories are packed: its URL, and the environment that reaches it.
    packed: Option<(String, Vec<(String, String)>)>,
    /// What serves the tree, where another process does.
    _meta: Option<Meta>,
    /// Its home.
    _beside: Option<Scratch>,
}

impl Mounted {
    pub(crate) fn new(url: &str, options: &[&str], variables: &[(String, String)]) -> Self {
        let scratch = Scratch::new();
        if let Some(folder) = url.strip_prefix("file://") {
            fs::create_dir_all(folder).expect("a folder can be made");
        }
        // Neighbours ask what others may do.
        let options = [&["--allow-other"], options].concat();
        let mount = Mount::new(&scratch.join("home"), url, &scratch.join("mnt"), &options, variables);
        let program = Program::new(Folder::new(mount.path()));
        Self { program, mount, scratch, moves: 0, packed: None, _meta: None, _beside: None }
    }

    /// One that joins the process that holds the volume, from whatever machine.
    pub(crate) fn joined(url: &str, options: &[&str], variables: &[(String, String)]) -> Self {
        if let Some(folder) = url.strip_prefix("file://") {
            fs::create_dir_all(folder).expect("a folder can be made");
        }
        let beside = Scratch::new();
        let secret = join_secret(beside.path());
        let meta = Meta::start(&beside.join("home"), url, &secret, &[], variables);
        let options = [options, &["--join-only", "--join-secret", &secret]].concat();
        Self { _meta: Some(meta), _beside: Some(beside), ..Self::new(url, &options, variables) }
    }

    /// One whose directories are packed.
    pub(crate) fn packed(url: &str, options: &[&str], variables: &[(String, String)]) -> Self {
        let packed = Some((url.to_owned(), variables.to_vec()));
        let mounted = Self { packed, ..Self::new(url, options, variables) };
        let folder = mounted.mount.path().display().to_string();
        let words = ["volume", "policy", &folder, "packed"];
        Forebay::new(&mounted.scratch.join("home"), words).run().succeeded();
        mounted
    }

    /// Compacts and checks a volume that is not mounted.
    fn check_packed(&self) {
        if let Some((url, variables)) = &self.packed {
            let home = self.scratch.join("upkeep");
            for words in [["gc", url], ["fsck", url]] {
                Forebay::new(&home, words).envs(variables).run().succeeded();
            }
        }
    }
}

impl Subject for Mounted {
    fn name(&self) -> &'static str {
        "a mount"
    }

    fn apply(&mut self, operation: &Operation) -> Answer {
        self.mount.within(DEADLINE, || self.program.run(operation))
    }

    fn tree(&mut self) -> Tree {
        self.mount.within(DEADLINE, || self.program.tree()).expect("the mount can be read")
    }

    fn move_on(&mut self) {
        self.moves += 1;
        self.end();
        self.mount.remount(&self.scratch.join(&format!("home-{}", self.moves)));
    }

    fn end(&mut self) {
        self.program.close_all().expect("files close");
        self.mount.unmount();
        self.check_packed();
    }
}

/// The layer without a kernel, over a bucket of its own.
pub(crate) struct Unmounted {
    program: Program<Layer>,
    scratch: Scratch,
    moves: usize,
}

impl Unmounted {
    /// One of which files leave for the store while they are written, if they do so `early`.
    pub(crate) fn new(early: bool) -> Self {
        let scratch = Scratch::new();
        let source = format!("file://{}", scratch.folder("bucket").display());
        let program = Program::new(Layer::new(&source, &scratch.folder("home"), early));
        Self { program, scratch, moves: 0 }
    }
}

impl Subject for Unmounted {
    fn name(&self) -> &'static str {
        "the layer without a kernel"
    }

    fn takes(&self, operation: &Operation) -> bool {
        !operation.is_the_kernels()
    }

    fn apply(&mut self, operation: &Operation) -> Answer {
        self.program.run(operation)
    }

    fn tree(&mut self) -> Tree {
        self.program.tree().expect("the layer can be read")
    }

    fn move_on(&mut self) {
        self.moves += 1;
        self.program.close_all().expect("files close");
        self.program.calls.reopen(&self.scratch.folder(&format!("home-{}", self.moves)));
    }

    fn end(&mut self) {
        self.program.close_all().expect("files close");
        self.program.calls.end();
    }
}

/// Does the same on a tmpfs and on all `subjects`. `step` is how many operations were begun when the first difference,
/// which comes in words, was seen.
fn play(subjects: &mut [Box<dyn Subject>], operations: &[Operation], step: &mut usize) -> Result<(), String> {
    let tmpfs = Tmpfs::new()?;
    let mut model = Program::new(tmpfs.calls());
    for operation in operations {
        *step += 1;
        let expected = model.run(operation);
        for subject in subjects.iter_mut().filter(|subject| subject.takes(operation)) {
            let got = subject.apply(operation);
            if expected != got {
                return Err(story(subject.name(), operation, &expected, &got));
            }
        }
        if matches!(operation, Operation::Remount) {
            model.close_all().expect("a tmpfs closes files");
            let tree = model.tree().expect("a tmpfs can be read");
            for subject in &mut *subjects {
                move_on(&mut **subject, &tree)?;
            }
        }
    }
    subjects.iter_mut().for_each(|subject| subject.end());
    Ok(())
}

/// Compares a tree before and after it is looked at from elsewhere.
fn move_on(subject: &mut dyn Subject, expected: &Tree) -> Result<(), String> {
    let name = subject.name();
    let differ = |when: &str, tree: Tree| match differences(expected, &tree) {
        Some(found) => Err(format!("{name} {when} moving on: {found}")),
        None => Ok(()),
    };
    differ("before", subject.tree())?;
    subject.move_on();
    differ("after", subject.tree())
}

/// Plays `operations` over subjects that `fresh` makes. Where they fail, finds a short part of them that fails, too,
/// and says what it is and how it fails.
pub(crate) fn check(
    operations: &[Operation],
    mut fresh: impl FnMut() -> Vec<Box<dyn Subject>>,
) -> Result<(), String> {
    let mut outcome = |operations: &[Operation], step: &mut usize| {
        let played = catch_unwind(AssertUnwindSafe(|| play(&mut fresh(), operations, step)));
        played.unwrap_or_else(|panic| Err(format!("it panicked: {:?}", panic.downcast_ref::<String>())))
    };
    let mut steps = 0;
    let Err(failure) = outcome(operations, &mut steps) else { return Ok(()) };
    eprintln!("step {steps}: {failure}\nis played again to be made shorter");
    let mut last = None;
    let short = shrink(&operations[..steps], MOST_REPLAYS, |part| {
        let failed = outcome(part, &mut 0).err();
        let fails = failed.is_some();
        last = failed.or(last.take());
        fails
    });
    let lines: Vec<_> = short.iter().map(|operation| format!("  {operation:?}")).collect();
    let (count, of) = (short.len(), operations.len());
    let how = last.unwrap_or_else(|| "never when it is played again".to_owned());
    Err(format!(
        "step {steps}: {failure}\n{count} of {of} operations fail, too:\n{}\n{how}",
        lines.join("\n")
    ))
}

/// A difference in words, long byte strings shortened.
fn story(subject: &str, operation: &Operation, expected: &Answer, got: &Answer) -> String {
    let said = |answer: &Answer| match answer {
        Ok(bytes) => format!("{:?} ({} bytes)", String::from_utf8_lossy(bytes), bytes.len()),
        Err(errno) => std::io::Error::from_raw_os_error(*errno).to_string(),
    };
    let short = |value: String| match value.char_indices().nth(400) {
        Some((at, _)) => format!("{}...", &value[..at]),
        None => value,
    };
    let (expected, got) = (short(said(expected)), short(said(got)));
    format!("{subject}: {operation:?}\n expected {expected}\n got {got}")
}
