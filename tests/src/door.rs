//! A door between Forebay and a store's server, which a test can shut or put in trouble, and which counts who goes
//! through.
//!
//! Speaks just enough HTTP/1.1: one request a connection, heads rewritten, bodies passed on as they come.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Longest head of a request, in bytes.
const HEAD_MAX: usize = 64 << 10;

/// The headers by which clouds are told what must hold.
const CONDITIONS: [&str; 4] =
    ["if-match", "if-none-match", "x-goog-if-generation-match", "x-amz-copy-source-if-match"];

/// The headers by which clouds are told a storage class.
const CLASSES: [&str; 3] = ["x-amz-storage-class", "x-goog-storage-class", "x-ms-access-tier"];

/// What the door is told by itself.
const FORGET: &str = "FORGET\r\n\r\n";

/// What happens to a request at the door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// It goes through.
    Pass,
    /// It goes through without its [`CONDITIONS`], as if the store ignored them.
    IgnoreConditions,
    /// It is answered as a store answers unknown credentials.
    Refuse,
    /// Its connection is closed without an answer.
    Shut,
    /// It is never answered, and its connection stays open until whoever asks gives up.
    Silent,
    /// So many requests go through; those after them find it shut.
    Few(usize),
    /// Parts of uploads and their completions go through; all else is answered as by [`Self::Refuse`].
    Parts,
    /// One [`Trouble`] or another befalls it in this many of 100 cases; else it goes through.
    Troubled(u32),
}

/// What can go wrong with one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trouble {
    /// 500 before anything is done.
    Internal,
    /// 503 before anything is done.
    SlowDown,
    /// 409 before anything is done, as S3 answers when writes of one key meet. Writes only: it has no other.
    Conflict,
    /// 412 before anything is done, though the condition holds. Requests with a condition only, as the next.
    Refused,
    /// It is carried out and answered 412, as when something on the way sends it twice.
    DoneAndRefused,
    /// The connection is closed before anything is done.
    Closed,
    /// It is carried out, and the answer is lost: a conditional write sent again then meets a true 412.
    AnswerLost,
    /// The answer breaks off in the middle.
    AnswerCut,
    /// It goes through late.
    Late,
    /// It goes through very late, though within the patience of whoever asks. One in [`STALLS`] that are late.
    Stalled,
}

impl Trouble {
    const ALL: [Self; 9] = [
        Self::Internal,
        Self::SlowDown,
        Self::Conflict,
        Self::Refused,
        Self::DoneAndRefused,
        Self::Closed,
        Self::AnswerLost,
        Self::AnswerCut,
        Self::Late,
    ];

    /// What befalls a request by chance, if it can.
    fn draw(chance: &mut StdRng, request: &str, is_conditional: bool) -> Option<Self> {
        let trouble = Self::ALL[chance.random_range(0..Self::ALL.len())];
        let is_write = !request.starts_with("GET") && !request.starts_with("HEAD");
        match trouble {
            Self::Conflict => is_write.then_some(trouble),
            Self::Refused | Self::DoneAndRefused => is_conditional.then_some(trouble),
            Self::Late if chance.random_range(0..STALLS) == 0 => Some(Self::Stalled),
            _ => Some(trouble),
        }
    }

    /// How late a request is passed on.
    fn delay(self) -> Duration {
        match self {
            Self::Late => Duration::from_millis(100),
            Self::Stalled => Duration::from_secs(2),
            _ => Duration::ZERO,
        }
    }
}

/// Status and code of an answer.
pub type Refusal = (&'static str, &'static str);

/// Of so many late requests one is stalled: each costs a test seconds.
const STALLS: u32 = 20;

/// A listening door; it stops with the test's process.
#[derive(Debug)]
pub struct Door {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    manner: Manner,
    requests: Vec<String>,
    conditions: Vec<String>,
    keys: Vec<String>,
    classes: Vec<String>,
    /// Which key the store takes, if not all, and how it refuses others.
    accepted: Option<(String, Refusal)>,
    chance: StdRng,
    troubles: BTreeMap<Trouble, usize>,
    /// How often everything was forgotten.
    age: u64,
}

impl Door {
    /// Listens on a free port of the loopback in front of `server`.
    pub fn new(server: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let (chance, troubles) = (StdRng::seed_from_u64(0), BTreeMap::new());
        let (requests, conditions, keys, classes, accepted) = Default::default();
        let manner = Manner::Pass;
        let state = State { manner, requests, conditions, keys, classes, accepted, chance, troubles, age: 0 };
        let state = Arc::new(Mutex::new(state));
        let shared = state.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (state, age) = (shared.clone(), lock(&shared).age);
                // A client that goes away early is its own affair.
                thread::spawn(move || serve(client, server, &state, age).ok());
            }
        });
        Ok(Self { address, state })
    }

    /// The endpoint to give to Forebay.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What happens from the next request on.
    pub fn set(&self, manner: Manner) {
        lock(&self.state).manner = manner;
    }

    /// Takes requests from now on that are signed with this key alone; others are answered by status and code.
    pub fn accept(&self, key: &str, refusal: Refusal) {
        lock(&self.state).accepted = Some((key.to_owned(), refusal));
    }

    /// What happens from the next request on, troubles coming as `seed` has them.
    pub fn trouble(&self, seed: u64, percent: u32) {
        lock(&self.state).chance = StdRng::seed_from_u64(seed);
        self.set(Manner::Troubled(percent));
    }

    /// Lets nothing through any more that came before: what a client that was killed has left on its way here, or is
    /// late. What went through already is the server's affair.
    pub fn forget(&self) {
        // Connections are taken in their order: all that were made before this one are older than its word.
        let mut last = TcpStream::connect(self.address).expect("the door listens");
        last.write_all(FORGET.as_bytes()).expect("the door reads");
        last.read_to_end(&mut Vec::new()).expect("the door answers by its end");
    }

    /// How often each trouble came.
    pub fn troubles(&self) -> BTreeMap<Trouble, usize> {
        lock(&self.state).troubles.clone()
    }

    /// Takes the requests seen since the last call, each as `METHOD /path?query`, with `bytes=FIRST-LAST` behind it
    /// if it names a range.
    pub fn take_requests(&self) -> Vec<String> {
        let mut state = lock(&self.state);
        state.conditions.clear();
        state.keys.clear();
        state.classes.clear();
        std::mem::take(&mut state.requests)
    }

    /// Takes the requests since the last call that name a storage class, each as `METHOD /path?query CLASS`.
    pub fn take_classes(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.state).classes)
    }

    /// The id of the access key with which each of those requests was signed, nothing for one that was not.
    pub fn keys(&self) -> Vec<String> {
        lock(&self.state).keys.clone()
    }

    /// Takes the conditions of writes since the last call, in their order, each as `name: value`.
    pub fn take_conditions(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.state).conditions)
    }
}

impl State {
    /// Notes a request, and says what happens to it.
    fn meet(
        &mut self,
        request: &str,
        range: Option<&str>,
        (conditions, class, key): (Vec<&str>, Option<&str>, &str),
    ) -> (Manner, Option<Trouble>) {
        let is_conditional = !conditions.is_empty();
        let range = range.map(|range| format!(" {range}")).unwrap_or_default();
        let plain = request.trim_end_matches(" HTTP/1.1");
        self.requests.push(format!("{plain}{range}"));
        self.keys.push(key.to_owned());
        self.classes.extend(class.map(|class| format!("{plain} {class}")));
        if !request.starts_with("GET") {
            self.conditions.extend(conditions.into_iter().map(str::to_owned));
        }
        let trouble = match self.manner {
            Manner::Troubled(percent) if self.chance.random_range(0..100) < percent => {
                Trouble::draw(&mut self.chance, request, is_conditional)
            }
            _ => None,
        };
        if let Some(trouble) = trouble {
            *self.troubles.entry(trouble).or_default() += 1;
        }
        let manner = self.manner;
        match manner {
            Manner::Few(0) => return (Manner::Shut, None),
            Manner::Few(left) => self.manner = Manner::Few(left - 1),
            Manner::Parts if !is_of_upload(request) => return (Manner::Refuse, None),
            _ => {}
        }
        (manner, trouble)
    }
}

/// Whether a request is a part of an upload or its completion.
fn is_of_upload(request: &str) -> bool {
    request.contains("uploadId=") && (request.starts_with("PUT") || request.starts_with("POST"))
}

fn lock(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(mut client: TcpStream, server: SocketAddr, state: &Mutex<State>, age: u64) -> io::Result<()> {
    let (head, rest) = read_head(&mut client)?;
    if head == FORGET {
        lock(state).age += 1;
        return client.shutdown(Shutdown::Both);
    }
    let mut lines = head.split("\r\n");
    let request = lines.next().unwrap_or_default();
    let name = |line: &str| line.split(':').next().unwrap_or_default().to_ascii_lowercase();
    let is_condition = |line: &str| CONDITIONS.contains(&name(line).as_str());
    let range = lines.clone().find(|line| name(line) == "range").map(|line| line[6..].trim());
    let conditions = lines.clone().filter(|line| is_condition(line)).collect();
    let signed = lines
        .clone()
        .find(|line| name(line) == "authorization")
        .and_then(|line| line.split_once("Credential="));
    let key = signed.and_then(|(_, rest)| rest.split('/').next()).unwrap_or_default();
    let class = lines.clone().find(|line| CLASSES.contains(&name(line).as_str()));
    let class = class.and_then(|line| line.split_once(':')).map(|(_, class)| class.trim());
    let is_head = request.starts_with("HEAD");
    let (manner, trouble) = lock(state).meet(request, range, (conditions, class, key));
    if let Some((_, (status, code))) = lock(state).accepted.clone().filter(|(accepted, _)| accepted != key) {
        return refuse(client, status, code, is_head);
    }
    match (manner, trouble) {
        (Manner::Shut, _) | (_, Some(Trouble::Closed)) => return client.shutdown(Shutdown::Both),
        (Manner::Silent, _) => return io::copy(&mut client, &mut io::sink()).map(drop),
        (Manner::Refuse, _) => return refuse(client, "403 Forbidden", "InvalidAccessKeyId", is_head),
        (_, Some(Trouble::Internal)) => {
            return refuse(client, "500 Internal Error", "InternalError", is_head);
        }
        (_, Some(Trouble::SlowDown)) => return refuse(client, "503 Slow Down", "SlowDown", is_head),
        (_, Some(Trouble::Conflict)) => {
            return refuse(client, "409 Conflict", "ConditionalRequestConflict", is_head);
        }
        (_, Some(Trouble::Refused)) => {
            return refuse(client, "412 Precondition Failed", "PreconditionFailed", is_head);
        }
        (_, Some(trouble)) => thread::sleep(trouble.delay()),
        _ => {}
    }
    let kept = lines.filter(|line| {
        let ignored = is_condition(line) && manner == Manner::IgnoreConditions;
        !line.is_empty() && name(line) != "connection" && !ignored
    });
    let head = kept.fold(format!("{request}\r\nConnection: close\r\n"), |head, line| head + line + "\r\n");
    let mut upstream = connect(server, state, age)?;
    upstream.write_all(format!("{head}\r\n").as_bytes())?;
    upstream.write_all(&rest)?;
    let (mut from_client, mut to_server) = (client.try_clone()?, upstream.try_clone()?);
    let body = thread::spawn(move || io::copy(&mut from_client, &mut to_server));
    answer(&mut upstream, &mut client, trouble)?;
    client.shutdown(Shutdown::Both)?;
    drop(body.join());
    Ok(())
}

/// A connection to the server for a client of that age, unless it was forgotten.
fn connect(server: SocketAddr, state: &Mutex<State>, age: u64) -> io::Result<TcpStream> {
    let state = lock(state);
    if state.age != age {
        return Err(io::ErrorKind::ConnectionAborted.into());
    }
    // Under the lock: what is forgotten later has gone through.
    TcpStream::connect(server)
}

/// Passes the answer on, as much of it as `trouble` leaves.
fn answer(upstream: &mut TcpStream, client: &mut TcpStream, trouble: Option<Trouble>) -> io::Result<()> {
    match trouble {
        Some(Trouble::AnswerLost) => io::copy(upstream, &mut io::sink()).map(drop),
        Some(Trouble::DoneAndRefused) => {
            io::copy(upstream, &mut io::sink())?;
            client.write_all(refusal("412 Precondition Failed", "PreconditionFailed").as_bytes())
        }
        Some(Trouble::AnswerCut) => {
            let mut whole = Vec::new();
            upstream.read_to_end(&mut whole)?;
            // Of a long answer the body is cut, which the client has begun to take; of a short one the head.
            client.write_all(&whole[..whole.len() - whole.len() / 3])
        }
        _ => io::copy(upstream, client).map(drop),
    }
}

/// The head of a request, and what came with it of the body.
pub(crate) fn read_head(client: &mut TcpStream) -> io::Result<(String, Vec<u8>)> {
    let mut bytes = Vec::new();
    let mut part = [0; 4096];
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let rest = bytes.split_off(end + 4);
            return Ok((String::from_utf8_lossy(&bytes).into_owned(), rest));
        }
        match client.read(&mut part)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ if bytes.len() > HEAD_MAX => return Err(io::ErrorKind::InvalidData.into()),
            length => bytes.extend_from_slice(&part[..length]),
        }
    }
}

/// An answer with an error of S3.
fn refusal(status: &str, code: &str) -> String {
    let body = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code>\
         <Message>This is a test of troubles.</Message></Error>"
    );
    let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/xml");
    format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// Answers with an error of S3 without doing anything; the answer to a HEAD has no body.
fn refuse(mut client: TcpStream, status: &str, code: &str, is_head: bool) -> io::Result<()> {
    let answer = refusal(status, code);
    let head = answer.split_inclusive("\r\n\r\n").next().unwrap_or_default();
    client.write_all(if is_head { head } else { &answer }.as_bytes())?;
    client.shutdown(Shutdown::Write)?;
    // Read to the end, so that the answer is not lost to a reset.
    io::copy(&mut client, &mut io::sink()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that answers each connection with the head it got.
    fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("port");
        let address = listener.local_addr().expect("address");
        thread::spawn(move || {
            for mut client in listener.incoming().flatten() {
                let (head, _) = read_head(&mut client).expect("head");
                write!(client, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{head}", head.len())
                    .expect("answer");
            }
        });
        address
    }

    fn ask(door: &Door) -> String {
        let mut stream = TcpStream::connect(door.address).expect("door");
        let request = "PUT /b/k HTTP/1.1\r\nHost: x\r\nRange: bytes=3-9\r\nIf-None-Match: *\r\n\r\n";
        stream.write_all(request.as_bytes()).expect("request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answer");
        answer
    }

    #[test]
    fn each_manner_does_what_it_says_and_requests_are_counted() {
        let door = Door::new(echo()).expect("door");
        assert!(ask(&door).contains("If-None-Match: *"));
        door.set(Manner::IgnoreConditions);
        let answer = ask(&door);
        assert!(!answer.contains("If-None-Match") && answer.contains("Host: x"), "{answer}");
        door.set(Manner::Refuse);
        assert!(ask(&door).contains("InvalidAccessKeyId"));
        door.set(Manner::Shut);
        assert_eq!(ask(&door), "");
        door.set(Manner::Parts);
        assert!(ask(&door).contains("InvalidAccessKeyId"));
        door.set(Manner::Few(1));
        assert!(ask(&door).starts_with("HTTP/1.1 200"));
        assert_eq!(ask(&door), "");
        door.set(Manner::Silent);
        let mut waiting = TcpStream::connect(door.address).expect("door");
        waiting
            .write_all(b"PUT /b/k HTTP/1.1\r\nRange: bytes=3-9\r\nIf-None-Match: *\r\n\r\n")
            .expect("sent");
        while lock(&door.state).requests.len() < 8 {
            thread::sleep(Duration::from_millis(1));
        }
        waiting.set_read_timeout(Some(Duration::from_millis(50))).expect("a timeout");
        let silence = waiting.read(&mut [0]).expect_err("no answer, and no end");
        assert_eq!(silence.kind(), io::ErrorKind::WouldBlock);
        assert_eq!(door.take_conditions(), ["If-None-Match: *"; 8]);
        assert_eq!(door.take_requests(), ["PUT /b/k bytes=3-9"; 8]);
        assert!(door.take_requests().is_empty());
    }

    #[test]
    fn every_trouble_comes_and_shows() {
        let door = Door::new(echo()).expect("door");
        door.set(Manner::Pass);
        let whole = ask(&door);
        door.trouble(1, 100);
        for _ in 0..200 {
            let before = door.troubles();
            let answer = ask(&door);
            let after = door.troubles();
            let (trouble, _) =
                after.iter().find(|(trouble, times)| before.get(trouble) != Some(times)).expect("one");
            match trouble {
                Trouble::Internal => assert!(answer.starts_with("HTTP/1.1 500"), "{answer}"),
                Trouble::SlowDown => assert!(answer.starts_with("HTTP/1.1 503"), "{answer}"),
                Trouble::Conflict => assert!(answer.starts_with("HTTP/1.1 409"), "{answer}"),
                Trouble::Refused | Trouble::DoneAndRefused => {
                    assert!(answer.starts_with("HTTP/1.1 412"), "{answer}");
                }
                Trouble::Closed | Trouble::AnswerLost => assert_eq!(answer, ""),
                Trouble::AnswerCut => assert!(whole.starts_with(&answer) && answer.len() < whole.len()),
                Trouble::Late | Trouble::Stalled => assert_eq!(answer, whole),
            }
        }
        let came = door.troubles();
        assert!(Trouble::ALL.iter().all(|trouble| came.contains_key(trouble)), "{came:?}");
    }

    #[test]
    fn what_was_on_its_way_is_forgotten() {
        let door = Door::new(echo()).expect("door");
        let mut old = TcpStream::connect(door.address).expect("door");
        door.forget();
        old.write_all(b"PUT /b/k HTTP/1.1\r\nHost: x\r\n\r\n").expect("request");
        let mut answer = String::new();
        old.read_to_string(&mut answer).expect("answer");
        assert_eq!(answer, "");
        assert!(ask(&door).starts_with("HTTP/1.1 200"));
    }
}
