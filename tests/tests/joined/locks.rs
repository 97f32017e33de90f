//! Locks that programs on several hosts take.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use forebay_tests::process::start;
use forebay_tests::{Mount, require_fuse, shell};

use super::{Hosts, wait_for};

/// Does what it is told, a line each, and says what came of it.
const PROGRAM: &str = r#"
import errno, fcntl, os, signal, struct, sys
EX, SH, UN, NB = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_UN, fcntl.LOCK_NB
RD, WR = fcntl.F_RDLCK, fcntl.F_WRLCK
def opened(name, flags=os.O_RDWR | os.O_CREAT):
    return os.open(name, flags, 0o644)
def flock(file, kind):
    fcntl.flock(file, kind)
def ranged(call, kind, file, start, length):
    told = fcntl.fcntl(file, call, struct.pack("hhqqi4x", kind, 0, start, length, 0))
    kind, _, start, length, pid = struct.unpack("hhqqi4x", told)
    return kind, start, length, pid
def lock(file, kind, start=0, length=0):
    ranged(fcntl.F_SETLK, kind, file, start, length)
def wait(file, kind, start=0, length=0):
    ranged(fcntl.F_SETLKW, kind, file, start, length)
def blocker(file, kind, start=0, length=0):
    return ranged(fcntl.F_GETLK, kind, file, start, length)
def ofd(file, kind, start=0, length=0):
    ranged(37, kind, file, start, length)
class Signalled(Exception):
    pass
def handle(*_):
    raise Signalled
signal.signal(signal.SIGUSR1, handle)
for line in sys.stdin:
    try:
        said = eval(line)
    except OSError as error:
        # One of two names.
        said = "EDEADLK" if error.errno == errno.EDEADLK else errno.errorcode.get(error.errno, error.errno)
    except Signalled:
        said = "signalled"
    print(said, flush=True)
"#;

/// How long what is to come is waited for.
const PATIENCE: Duration = Duration::from_secs(120);

struct Program {
    process: Child,
    tells: ChildStdin,
    says: Receiver<String>,
}

impl Program {
    fn start(folder: &Path) -> Self {
        let mut command = Command::new("python3");
        command.args(["-c", PROGRAM]).current_dir(folder).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = start(&mut command).expect("python3 starts");
        let tells = process.stdin.take().expect("piped");
        let said = BufReader::new(process.stdout.take().expect("piped")).lines();
        let (say, says) = channel();
        // Until it ends, or nobody listens.
        std::thread::spawn(move || said.map_while(Result::ok).try_for_each(|line| say.send(line)));
        Self { process, tells, says }
    }

    fn tell(&mut self, call: &str) {
        writeln!(self.tells, "{call}").expect("it listens");
    }

    #[track_caller]
    fn said(&mut self) -> String {
        self.says.recv_timeout(PATIENCE).expect("it says something")
    }

    #[track_caller]
    fn ask(&mut self, call: &str) -> String {
        self.tell(call);
        self.said()
    }

    #[track_caller]
    fn check(&mut self, call: &str, expected: &str) {
        assert_eq!(self.ask(call), expected, "{call}");
    }

    /// Tells it to do what has to wait, and returns once the kernel has it do that.
    fn begin(&mut self, call: &str) {
        self.tell(call);
        let waits = format!("/proc/{}/syscall", self.process.id());
        // flock and fcntl, by their numbers.
        let is_at_it = |shown: String| ["73 ", "72 "].iter().any(|number| shown.starts_with(number));
        wait_for("the call", || fs::read_to_string(&waits).is_ok_and(is_at_it));
    }

    fn signal(&self, name: &str) {
        shell(Path::new("/"), &format!("kill -{name} {}", self.process.id())).succeeded();
    }

    fn kill(&mut self) {
        self.process.kill().expect("it can be killed");
        self.process.wait().expect("it ends");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn two_mounts(hosts: &Hosts) -> [Mount; 2] {
    [hosts.mount("one", &[]), hosts.mount("other", &[])]
}

/// Promise S80: Where several hosts write to a volume, locks of files hold between the programs of all of them
#[test]
fn what_a_program_of_one_host_locks_no_program_of_another_does() {
    if !require_fuse("what_a_program_of_one_host_locks_no_program_of_another_does") {
        return;
    }
    let hosts = Hosts::of_folder();
    let mounts = two_mounts(&hosts);
    fs::write(mounts[0].path().join("locked"), "a file that is locked").expect("written");
    for (holder, other) in [(0, 1), (1, 0)] {
        let folders = [holder, other].map(|at: usize| mounts[at].path());
        let [mut holder, mut beside, mut other] = [folders[0], folders[0], folders[1]].map(Program::start);
        for program in [&mut holder, &mut beside, &mut other] {
            program.check("globals().update(f=opened('locked'), g=opened('locked', os.O_RDONLY))", "None");
        }
        // Whole files, by flock.
        holder.check("flock(f, EX | NB)", "None");
        other.check("flock(f, EX | NB)", "EAGAIN");
        other.check("flock(g, SH | NB)", "EAGAIN");
        beside.check("flock(f, EX | NB)", "EAGAIN");
        holder.check("flock(f, SH | NB)", "None");
        other.check("flock(g, SH | NB)", "None");
        holder.check("flock(f, EX | NB)", "EAGAIN");
        other.check("flock(g, UN)", "None");
        holder.check("flock(f, EX | NB)", "None");
        holder.check("flock(f, UN)", "None");
        other.check("flock(f, EX | NB)", "None");
        other.check("flock(f, UN)", "None");
        // Runs of bytes.
        holder.check("lock(f, WR, 10, 10)", "None");
        other.check("lock(f, WR, 15, 1)", "EAGAIN");
        other.check("lock(f, WR, 20, 10)", "None");
        holder.check("lock(f, RD, 0, 0)", "EAGAIN");
        let pid = holder.process.id();
        other.check("blocker(f, WR, 0, 20)", "(1, 10, 10, 0)");
        beside.check("blocker(f, WR, 0, 20)", &format!("(1, 10, 10, {pid})"));
        other.check("blocker(f, WR, 0, 10)[0]", "2");
        // What a process has locked by whichever descriptor ends when it closes any one of the file.
        holder.check("os.close(g)", "None");
        other.check("lock(f, WR, 10, 10)", "None");
        other.check("lock(f, fcntl.F_UNLCK)", "None");
        holder.check("globals().update(g=opened('locked', os.O_RDONLY))", "None");
        holder.check("lock(g, RD, 0, 5)", "None");
        other.check("lock(f, WR, 4, 1)", "EAGAIN");
        holder.check("os.close(g)", "None");
        other.check("lock(f, WR, 4, 1)", "None");
        other.check("lock(f, fcntl.F_UNLCK)", "None");
        // What an open file has locked ends with its last descriptor, moments later.
        for take in ["ofd(f, WR, 0, 10)", "flock(f, EX | NB)"] {
            holder.check("globals().update(h=os.dup(f))", "None");
            holder.check(take, "None");
            holder.check("os.close(f)", "None");
            other.check("lock(f, RD, 0, 1)", "EAGAIN");
            holder.check("os.close(h)", "None");
            wait_for("the end of a lock", || other.ask("lock(f, RD, 0, 1)") == "None");
            other.check("lock(f, fcntl.F_UNLCK)", "None");
            holder.check("globals().update(f=opened('locked'))", "None");
        }
        // And with its process.
        holder.check("flock(f, EX | NB)", "None");
        other.check("flock(f, EX | NB)", "EAGAIN");
        holder.kill();
        wait_for("the end of a lock", || other.ask("flock(f, EX | NB)") == "None");
        beside.check("flock(f, EX | NB)", "EAGAIN");
        // So that nobody has it when the others come, whatever a process's end takes.
        other.check("flock(f, UN)", "None");
    }
}

/// Promise S80: Where several hosts write to a volume, locks of files hold between the programs of all of them
#[test]
fn a_program_waits_for_what_another_host_has_locked_until_it_is_free_or_it_is_sent_a_signal() {
    if !require_fuse(
        "a_program_waits_for_what_another_host_has_locked_until_it_is_free_or_it_is_sent_a_signal",
    ) {
        return;
    }
    let hosts = Hosts::of_folder();
    let mounts = two_mounts(&hosts);
    for (holder, other) in [(0, 1), (1, 0)] {
        let folders = [holder, other].map(|at: usize| mounts[at].path());
        let [mut holder, mut waiter, mut next] = [folders[0], folders[1], folders[1]].map(Program::start);
        for program in [&mut holder, &mut waiter, &mut next] {
            program.check("globals().update(f=opened('waited'), g=opened('second'))", "None");
        }
        for (take, wait, end) in [
            ("flock(f, EX)", "flock(f, EX)", "flock(f, UN)"),
            ("lock(f, WR, 5, 5)", "wait(f, RD, 0, 6)", "lock(f, fcntl.F_UNLCK)"),
        ] {
            holder.check(take, "None");
            waiter.begin(wait);
            holder.check(end, "None");
            assert_eq!(waiter.said(), "None", "it was handed over");
            holder.check(&take.replace("EX)", "EX | NB)"), "EAGAIN");
            waiter.check(end, "None");
            // One that is sent a signal waits no more, and is not given what it waited for.
            holder.check(take, "None");
            waiter.begin(wait);
            waiter.signal("USR1");
            assert_eq!(waiter.said(), "signalled");
            // Nor does one that is killed, also with nobody to let it go.
            let mut killed = Program::start(folders[1]);
            killed.check("globals().update(f=opened('waited'))", "None");
            killed.begin(wait);
            killed.kill();
            holder.check(end, "None");
            next.check(take, "None");
            next.check(end, "None");
        }
        // Of two that wait for each other one is told: mostly the one that the kernel hears last.
        holder.check("lock(f, WR)", "None");
        waiter.check("lock(g, WR)", "None");
        waiter.begin("wait(f, WR)");
        holder.tell("wait(g, WR)");
        let (mut held, mut told) = ([(&mut holder, "f"), (&mut waiter, "g")], None);
        wait_for("the end of a wait", || {
            told = held
                .iter()
                .position(|(program, _)| program.says.try_recv().is_ok_and(|said| said == "EDEADLK"));
            told.is_some()
        });
        held.rotate_left(told.expect("one of them"));
        let [(told, file), (other, _)] = held;
        told.check(&format!("lock({file}, fcntl.F_UNLCK)"), "None");
        assert_eq!(other.said(), "None");
    }
}

/// Promise S80: Where several hosts write to a volume, locks of files hold between the programs of all of them
#[test]
fn locks_outlive_the_process_that_serves_the_tree() {
    if !require_fuse("locks_outlive_the_process_that_serves_the_tree") {
        return;
    }
    let hosts = Hosts::of_folder();
    let mut first = hosts.mount("first", &[]);
    let mut second = hosts.mount("second", &["--join-only"]);
    let third = hosts.mount("third", &[]);
    let [mut holder, mut waiter, mut other] = [second.path(), third.path(), third.path()].map(Program::start);
    for program in [&mut holder, &mut waiter, &mut other] {
        program.check("globals().update(f=opened('a'), g=opened('b'))", "None");
    }
    shell(second.path(), "sync a b .").succeeded();
    holder.check("flock(f, EX)", "None");
    holder.check("lock(g, WR, 0, 10)", "None");
    holder.check("lock(g, WR, 20, 10)", "None");
    waiter.begin("flock(f, EX)");
    first.kill();
    holder.check("lock(g, fcntl.F_UNLCK, 0, 10)", "None");
    other.check("lock(g, WR, 25, 1)", "EAGAIN");
    other.check("lock(g, WR, 5, 1)", "None");
    other.check("flock(f, SH | NB)", "EAGAIN");
    holder.check("flock(f, UN)", "None");
    assert_eq!(waiter.said(), "None", "it has waited since before");
    holder.check("flock(f, EX | NB)", "EAGAIN");
    // As of a host that is lost.
    second.kill();
    drop(holder);
    waiter.check("flock(f, UN)", "None");
    other.check("wait(g, WR, 20, 10)", "None");
    drop((waiter, other, third));
}

/// Adds one to a number in a file, so often, as programs do that use Python's `filelock`: the lock is tried until it is free.
const COUNT: &str = r#"
import fcntl, os, sys, time
times, kind = int(sys.argv[1]), sys.argv[2]
kept = os.open("kept", os.O_RDWR | os.O_CREAT, 0o644)
for _ in range(times):
    lock = os.open("count.lock", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.005)
    if kind == "reopened":
        with open("count") as file:
            count = int(file.read())
        with open("count", "w") as file:
            file.write(str(count + 1))
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)
    if kind == "kept":
        fcntl.lockf(kept, fcntl.LOCK_EX)
        count = int(os.pread(kept, 100, 0) or b"0")
        os.pwrite(kept, str(count + 1).encode(), 0)
        fcntl.lockf(kept, fcntl.LOCK_UN)
"#;

/// Promise S80: who locks a file sees what was written to it before under a lock
#[test]
fn numbers_that_programs_on_two_hosts_count_up_in_turns_lose_none() {
    if !require_fuse("numbers_that_programs_on_two_hosts_count_up_in_turns_lose_none") {
        return;
    }
    const TIMES: usize = 20;
    for hosts in [Hosts::of_folder(), Hosts::of_s3()] {
        let mounts = two_mounts(&hosts);
        fs::write(mounts[0].path().join("count"), "0").expect("written");
        for (kind, file) in [("reopened", "count"), ("kept", "kept")] {
            let count = |mount: &Mount| {
                let mut command = Command::new("python3");
                command.args(["-c", COUNT, &TIMES.to_string(), kind]).current_dir(mount.path());
                start(&mut command).expect("python3 starts")
            };
            let mut programs: Vec<Child> = mounts.iter().chain(&mounts).map(count).collect();
            for program in &mut programs {
                assert!(program.wait().expect("ended").success());
            }
            for mount in &mounts {
                let counted = fs::read_to_string(mount.path().join(file)).expect("read");
                assert_eq!(counted, (4 * TIMES).to_string(), "{kind}");
            }
        }
    }
}

/// Rows of a database, each in a transaction of its own.
const INSERT: &str = r#"
import sqlite3, sys
rows, writer = int(sys.argv[1]), int(sys.argv[2])
db = sqlite3.connect("rows.db", timeout=600, isolation_level=None)
for number in range(rows):
    db.execute("BEGIN IMMEDIATE")
    (before,) = db.execute("SELECT count(*) FROM rows").fetchone()
    db.execute("INSERT INTO rows VALUES (?, ?, ?)", (writer, number, before))
    db.execute("COMMIT")
db.close()
"#;

const ROWS: &str = r#"
python3 -c "
import sqlite3
db = sqlite3.connect('rows.db', timeout=600)
assert db.execute('PRAGMA integrity_check').fetchall() == [('ok',)]
rows = db.execute('SELECT writer, number FROM rows ORDER BY writer, number').fetchall()
assert rows == [(writer, number) for writer in range(4) for number in range($1)], rows
orders = [order for (order,) in db.execute('SELECT place FROM rows ORDER BY place')]
assert orders == list(range(4 * $1)), orders
"
"#;

/// Promise S80: who locks a file sees what was written to it before under a lock
#[test]
fn sqlite_databases_take_rows_from_two_hosts_at_once() {
    if !require_fuse("sqlite_databases_take_rows_from_two_hosts_at_once") {
        return;
    }
    // SQLite takes no turns: who waits is passed by, the longer the more others there are.
    const EACH: usize = 8;
    let hosts = Hosts::of_folder();
    let mounts = two_mounts(&hosts);
    let make = "python3 -c \"import sqlite3; sqlite3.connect('rows.db').execute('CREATE TABLE rows(writer, number, place)')\"";
    shell(mounts[0].path(), make).succeeded();
    let insert = |(writer, mount): (usize, &Mount)| {
        let mut command = Command::new("python3");
        let options = [EACH.to_string(), writer.to_string()];
        command.args(["-c", INSERT]).args(options).current_dir(mount.path());
        start(&mut command).expect("python3 starts")
    };
    let mut writers: Vec<Child> = mounts.iter().chain(&mounts).enumerate().map(insert).collect();
    for writer in &mut writers {
        assert!(writer.wait().expect("ended").success());
    }
    for mount in &mounts {
        shell(mount.path(), &ROWS.replace("$1", &EACH.to_string())).succeeded();
    }
}
