//! A virtual machine with RDMA devices: Linux with Soft-RoCE, emulated, so that it runs wherever QEMU does.
//!
//! It shows that programs are correct, never how fast they are. Both devices are in the one machine, `rxe0` at 10.0.0.1
//! and `rxe1` at 10.0.0.2, and what goes from one to the other passes a cable. At index 0 of its addresses (GIDs) each
//! has its IPv6 one, of its link alone, and at index 1 the IPv4 one, both for RoCE v2. Nothing leads out of the machine.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::settings::{skip, tool};
use crate::{Outcome, Scratch, process};

/// Makes the devices, and runs the programs.
const INIT: &str = include_str!("machine/init");
/// Where the C library looks for others, and libibverbs for what drives a device.
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";
/// Has libibverbs drive devices of Soft-RoCE.
const DRIVER: &str = "/etc/libibverbs.d/rxe.driver";
/// What tests read, which means the same in the machine.
const VARIABLES: [&str; 3] = ["FOREBAY_TEST_SCALE", "FOREBAY_TEST_SEED", "RUST_BACKTRACE"];
/// A panic ends the machine; below 4 are warnings and worse.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 loglevel=4 panic=-1";

/// Held while a machine runs: one takes all cores.
static RUNNING: Mutex<()> = Mutex::new(());

/// A program to run in a machine, as root.
#[derive(Clone, Debug)]
pub struct Program {
    /// The one on this machine that is to be in the other; `None` where it has it anyway.
    file: Option<PathBuf>,
    /// `NAME=VALUE` each.
    variables: Vec<String>,
    /// Path and arguments.
    words: Vec<String>,
}

impl Program {
    /// The program at `path`, with all libraries that it is linked to.
    pub fn new(path: PathBuf, arguments: &[&str]) -> Self {
        let name = path.to_str().expect("a path of UTF-8").to_owned();
        let words =
            std::iter::once(name.as_str()).chain(arguments.iter().copied()).map(str::to_owned).collect();
        Self { file: Some(path), variables: Vec::new(), words }
    }

    /// A script for busybox's shell, which has busybox's other programs.
    pub fn shell(script: &str) -> Self {
        let words = ["/bin/sh", "-euc", script].map(str::to_owned).to_vec();
        Self { file: None, variables: Vec::new(), words }
    }

    /// Sets environment variables.
    #[must_use]
    pub fn envs(mut self, variables: &[(&str, &str)]) -> Self {
        self.variables.extend(variables.iter().map(|(name, value)| format!("{name}={value}")));
        self
    }

    /// How a shell is told to run it.
    fn line(&self) -> String {
        let words: Vec<String> = self.variables.iter().chain(&self.words).map(|word| quoted(word)).collect();
        format!("env {}", words.join(" "))
    }
}

/// One word of a shell's.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Runs `programs` one after the other in a machine of their own, and tells how each ended: both its outputs as one, and
/// the kernel's warnings, with more after a failure, as what it complained about. `None` where `test` cannot run, which
/// is shown; a test fails where they have not ended when its `patience` has.
pub fn run(test: &str, programs: &[Program], patience: Duration) -> Option<Vec<Outcome>> {
    let parts = Parts::find(test)?;
    let scratch = Scratch::new();
    parts.fill(&scratch.folder("root"), programs);
    let _turn = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut machine = parts.start(&scratch);
    let ended = ends(&mut machine, patience);
    let read = |name: &str| {
        let bytes = fs::read(scratch.join(name)).expect("the machine writes it");
        String::from_utf8_lossy(&bytes).replace("\r\n", "\n")
    };
    let (output, kernel) = (read("output"), read("kernel"));
    assert!(ended, "the machine ran past {patience:?}\n--- output\n{output}\n--- kernel\n{kernel}");
    Some(
        programs
            .iter()
            .enumerate()
            .map(|(number, program)| outcome(number, program, &output, &kernel))
            .collect(),
    )
}

/// Whether the machine ends before `patience` does; it has ended then.
fn ends(machine: &mut Child, patience: Duration) -> bool {
    let started = Instant::now();
    while machine.try_wait().expect("a child can be waited for").is_none() {
        if started.elapsed() > patience {
            machine.kill().expect("a child can be killed");
            machine.wait().expect("a child can be waited for");
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// How the program of this number ended, which `machine/init` writes around what it printed.
fn outcome(number: usize, program: &Program, output: &str, kernel: &str) -> Outcome {
    let between = |text: &str| {
        let (_, text) = text.split_once(&format!("\n--- begins {number}\n"))?;
        let (printed, rest) = text.split_once(&format!("\n--- ended {number} "))?;
        Some((printed.to_owned(), rest.lines().next()?.parse::<i32>().ok()?))
    };
    let command = program.line();
    let Some((stdout, status)) = between(output) else {
        panic!("the machine ended before {command} did\n--- output\n{output}\n--- kernel\n{kernel}");
    };
    // A shell adds 128 to the number of a signal.
    Outcome { command, code: (status < 128).then_some(status), stdout, stderr: kernel.to_owned() }
}

/// What a machine is made of.
struct Parts {
    qemu: PathBuf,
    kernel: PathBuf,
    busybox: PathBuf,
    ip: PathBuf,
    rdma: PathBuf,
    driver: PathBuf,
}

impl Parts {
    /// All of them, or the skip of `test` is shown.
    fn find(test: &str) -> Option<Self> {
        let names = fs::read_dir(Path::new(LIBRARIES).join("libibverbs")).into_iter().flatten().flatten();
        let mut drivers = names.map(|entry| entry.path());
        let driver = drivers.find(|path| path.file_name().is_some_and(is_driver));
        let Some(driver) = driver.filter(|_| Path::new(DRIVER).exists()) else {
            skip(test, "libibverbs has no driver of Soft-RoCE");
            return None;
        };
        Some(Self {
            qemu: tool("qemu-system-x86_64", test)?,
            kernel: tool("rdma-vm/kernel", test)?,
            busybox: tool("busybox", test)?,
            ip: tool("ip", test)?,
            rdma: tool("rdma", test)?,
            driver,
        })
    }

    /// Writes all files of a machine that runs `programs` to the folder `root`.
    fn fill(&self, root: &Path, programs: &[Program]) {
        for folder in ["bin", "dev", "etc", "modules", "proc", "sys", "tmp"] {
            fs::create_dir_all(root.join(folder)).expect("a scratch folder can be made");
        }
        let lines = programs.iter().enumerate();
        let texts = [
            ("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n".to_owned()),
            ("etc/passwd", "root:x:0:0::/tmp:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n".to_owned()),
            ("init", INIT.to_owned()),
            (
                "programs",
                lines.map(|(number, program)| format!("run {number} {}\n", program.line())).collect(),
            ),
            ("variables", self.variables()),
        ];
        for (name, text) in texts {
            fs::write(root.join(name), text).expect("a scratch file can be written");
        }
        fs::set_permissions(root.join("init"), PermissionsExt::from_mode(0o755))
            .expect("its mode can be set");
        fs::copy(&self.busybox, root.join("bin/busybox")).expect("a program can be copied");
        let modules = self.kernel.parent().expect("a file has a folder");
        for entry in fs::read_dir(modules).expect("the modules are installed").flatten() {
            if entry.path() != self.kernel {
                fs::copy(entry.path(), root.join("modules").join(entry.file_name()))
                    .expect("it can be copied");
            }
        }
        let given: BTreeSet<&PathBuf> = programs.iter().filter_map(|program| program.file.as_ref()).collect();
        for file in self.files(&given) {
            copy(&file, root);
        }
        for program in given {
            shrink(&inside(root, program));
        }
    }

    /// All that lies where it does on this machine.
    fn files(&self, given: &BTreeSet<&PathBuf>) -> BTreeSet<PathBuf> {
        // What is opened by its name when it is needed: the first unwinds the stack of a thread.
        let opened = [Path::new(LIBRARIES).join("libgcc_s.so.1"), self.driver.clone()];
        let linked: Vec<&PathBuf> =
            opened.iter().chain([&self.ip, &self.rdma]).chain(given.iter().copied()).collect();
        let libraries = linked.iter().copied().chain([&self.busybox]).flat_map(|file| libraries(file));
        libraries.chain(linked.iter().copied().cloned()).chain([PathBuf::from(DRIVER)]).collect()
    }

    /// What all programs find in their environment; `init` reads the first two.
    fn variables(&self) -> String {
        let path = |path: &Path| path.to_str().expect("a path of UTF-8").to_owned();
        let own = [("ip", path(&self.ip)), ("rdma", path(&self.rdma)), ("HOME", "/tmp".to_owned())];
        let given = VARIABLES.iter().filter_map(|name| Some((*name, std::env::var(name).ok()?)));
        own.into_iter()
            .chain(given)
            .map(|(name, value)| format!("export {name}={}\n", quoted(&value)))
            .collect()
    }

    /// Starts the machine; it writes `output` and `kernel`.
    fn start(&self, scratch: &Scratch) -> Child {
        let pack = "cd root && find . | \"$0\" cpio --quiet -o -H newc >../image";
        let mut command = Command::new("sh");
        command.args(["-c", pack]).arg(&self.busybox).current_dir(scratch.path());
        let packed = process::output(&mut command).expect("a shell starts");
        assert!(packed.status.success(), "{}", String::from_utf8_lossy(&packed.stderr));
        fs::remove_dir_all(scratch.join("root")).expect("a scratch folder can be removed");
        let mut command = Command::new(&self.qemu);
        command.args(["-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", "max", "-smp", "2"]);
        command.args(["-m", "1024", "-no-reboot", "-nodefaults", "-display", "none"]);
        command.args(["-serial", "file:kernel", "-serial", "file:output"]);
        command.arg("-kernel").arg(&self.kernel).args(["-initrd", "image", "-append", KERNEL_ARGUMENTS]);
        command.current_dir(scratch.path()).stdin(Stdio::null());
        process::start(&mut command).expect("QEMU starts")
    }
}

fn is_driver(name: &std::ffi::OsStr) -> bool {
    name.to_str().is_some_and(|name| name.starts_with("librxe"))
}

/// Where `file` of this machine lies in the one whose files are in `root`.
fn inside(root: &Path, file: &Path) -> PathBuf {
    root.join(file.strip_prefix("/").expect("an absolute path"))
}

fn copy(file: &Path, root: &Path) {
    let to = inside(root, file);
    fs::create_dir_all(to.parent().expect("a file has a folder")).expect("a scratch folder can be made");
    fs::copy(file, to).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
}

/// All libraries that a program or a library is linked to; none for a static program.
fn libraries(file: &Path) -> Vec<PathBuf> {
    let output = process::output(Command::new("ldd").arg(file)).expect("ldd starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect()
}

/// Takes what only a debugger reads from a program, most of its size.
fn shrink(program: &Path) {
    let output =
        process::output(Command::new("strip").arg("--strip-debug").arg(program)).expect("strip starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
