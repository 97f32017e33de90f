//! Programs that run beside the test: what only a second process can do, or only unsafe code.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use forebay_tests::process::{output, start};

use super::calls::{Answer, Called};
use super::operation::{HOLDERS, Operation};

/// How many run beside one file system.
const NEIGHBOURS: usize = 2;

/// One of them, which ends when it is dropped.
struct Neighbour {
    process: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

/// The interpreter itself: what is found by its name may be a script that looks for it.
fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(|| {
        let mut command = Command::new("python3");
        let asked = output(command.args(["-c", "import sys; print(sys.executable)"]));
        PathBuf::from(String::from_utf8_lossy(&asked.expect("python3 starts").stdout).trim())
    })
}

impl Neighbour {
    fn new(root: &Path) -> Self {
        let mut command = Command::new(python());
        command.args(["-I", "-S", "-c", include_str!("neighbour.py")]).arg(root);
        let mut process =
            start(command.stdin(Stdio::piped()).stdout(Stdio::piped())).expect("python3 starts");
        let requests = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().expect("it is piped"));
        Self { process, requests, answers }
    }

    fn ask(&mut self, request: &str) -> Answer {
        let requests = self.requests.as_mut().expect("it was not told to end");
        writeln!(requests, "{request}").expect("a neighbour lives");
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("a neighbour answers in text");
        let (errno, said) = line.trim_end_matches('\n').split_once(' ').expect("a neighbour lives");
        match errno.parse() {
            Ok(0) => Ok(bytes(said)),
            Ok(errno) => Err(errno),
            Err(_) => panic!("a neighbour said {line:?}"),
        }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.requests = None;
        let _ = self.process.wait();
    }
}

/// All that run beside one file system. They start when they are first needed.
pub(crate) struct Neighbours {
    root: PathBuf,
    running: [Option<Neighbour>; NEIGHBOURS],
}

impl Neighbours {
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), running: Default::default() }
    }

    fn ask(&mut self, number: usize, request: &str) -> Answer {
        self.running[number].get_or_insert_with(|| Neighbour::new(&self.root)).ask(request)
    }

    pub(crate) fn map(&mut self, path: &Path, offset: u64, length: usize) -> Called<()> {
        self.ask(0, &format!("map {} {offset} {length}", hex(path.as_os_str().as_bytes()))).map(drop)
    }

    pub(crate) fn store(&mut self, at: usize, bytes: &[u8]) -> Called<usize> {
        let stored = self.ask(0, &format!("store {at} {}", hex(bytes)))?;
        Ok(String::from_utf8_lossy(&stored).parse().expect("a neighbour says a number"))
    }

    pub(crate) fn load(&mut self, at: usize, length: usize) -> Called<Vec<u8>> {
        self.ask(0, &format!("load {at} {length}"))
    }

    pub(crate) fn sync(&mut self) -> Called<()> {
        self.ask(0, "sync").map(drop)
    }

    /// Marks what is mapped as modified.
    pub(crate) fn touch(&mut self) -> Called<()> {
        self.ask(0, "touch").map(drop)
    }

    pub(crate) fn unmap(&mut self) -> Called<()> {
        if self.running[0].is_some() { self.ask(0, "unmap").map(drop) } else { Ok(()) }
    }

    /// What only a kernel does.
    pub(crate) fn run(&mut self, operation: &Operation) -> Answer {
        let path = |path: &Path| hex(path.as_os_str().as_bytes());
        match operation {
            Operation::Take { holder, path: taken } => {
                self.ask(holder / 2, &format!("take {holder} {}", path(taken)))
            }
            Operation::Drop { holder } => self.ask(holder / 2, &format!("drop {holder}")),
            Operation::Lock { holder, path: file, kind, how, range: (start, length) } => {
                let request = format!("lock {holder} {} {kind} {how} {start} {length}", path(file));
                self.ask(holder / 2, &request)
            }
            Operation::May { path: asked, user, group, wanted } => {
                self.ask(1, &format!("may {} {user} {group} {wanted}", path(asked)))
            }
            other => unreachable!("{other:?} needs no neighbour"),
        }
    }

    /// Nothing stays open or mapped.
    pub(crate) fn rest(&mut self) -> Called<()> {
        self.unmap()?;
        for holder in 0..HOLDERS {
            if self.running[holder / 2].is_some() {
                self.ask(holder / 2, &format!("drop {holder}"))?;
            }
        }
        Ok(())
    }
}

fn hex(bytes: &[u8]) -> String {
    let digit = |four: u8| char::from_digit(u32::from(four), 16).expect("four bits");
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digit =
        |digit: u8| char::from(digit).to_digit(16).expect("a neighbour says hexadecimal digits") as u8;
    hex.as_bytes().chunks_exact(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}
