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
const CONDITIONS: [&str; 3] = ["if-match", "if-none-match", "x-goog-if-generation-match"];

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
    /// So many requests go through; those after them find it shut.
    Few(usize),
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
    /// 409 before anything is done, as S3 answers when writes of one key meet.
    Conflict,
    /// The connection is closed before anything is done.
    Closed,
    /// It is carried out, and the answer is lost: a conditional write sent again then meets a true 412.
    AnswerLost,
    /// The answer breaks off in the middle.
    AnswerCut,
    /// It goes through late.
    Late,
}

impl Trouble {
    const ALL: [Self; 7] = [
        Self::Internal,
        Self::SlowDown,
        Self::Conflict,
        Self::Closed,
        Self::AnswerLost,
        Self::AnswerCut,
        Self::Late,
    ];
}

/// How late a late request is passed on.
const LATE: Duration = Duration::from_millis(100);

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
    chance: StdRng,
    troubles: BTreeMap<Trouble, usize>,
}

impl Door {
    /// Listens on a free port of the loopback in front of `server`.
    pub fn new(server: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let (chance, troubles) = (StdRng::seed_from_u64(0), BTreeMap::new());
        let (requests, conditions) = Default::default();
        let state = State { manner: Manner::Pass, requests, conditions, chance, troubles };
        let state = Arc::new(Mutex::new(state));
        let shared = state.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let state = shared.clone();
                // A client that goes away early is its own affair.
                thread::spawn(move || serve(client, server, &state).ok());
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

    /// What happens from the next request on, troubles coming as `seed` has them.
    pub fn trouble(&self, seed: u64, percent: u32) {
        lock(&self.state).chance = StdRng::seed_from_u64(seed);
        self.set(Manner::Troubled(percent));
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
        std::mem::take(&mut state.requests)
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
        conditions: Vec<&str>,
    ) -> (Manner, Option<Trouble>) {
        let range = range.map(|range| format!(" {range}")).unwrap_or_default();
        self.requests.push(format!("{}{range}", request.trim_end_matches(" HTTP/1.1")));
        let conditional = !conditions.is_empty();
        self.conditions.extend(conditions.into_iter().map(str::to_owned));
        let trouble = match self.manner {
            Manner::Troubled(percent) if self.chance.random_range(0..100) < percent => {
                let trouble = Trouble::ALL[self.chance.random_range(0..Trouble::ALL.len())];
                // Only conditional writes are ever answered 409.
                (conditional || trouble != Trouble::Conflict).then_some(trouble)
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
            _ => {}
        }
        (manner, trouble)
    }
}

fn lock(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(mut client: TcpStream, server: SocketAddr, state: &Mutex<State>) -> io::Result<()> {
    let (head, rest) = read_head(&mut client)?;
    let mut lines = head.split("\r\n");
    let request = lines.next().unwrap_or_default();
    let name = |line: &str| line.split(':').next().unwrap_or_default().to_ascii_lowercase();
    let is_condition = |line: &str| CONDITIONS.contains(&name(line).as_str());
    let range = lines.clone().find(|line| name(line) == "range").map(|line| line[6..].trim());
    let conditions = lines.clone().filter(|line| is_condition(line) && !request.starts_with("GET")).collect();
    let (manner, trouble) = lock(state).meet(request, range, conditions);
    match (manner, trouble) {
        (Manner::Shut, _) | (_, Some(Trouble::Closed)) => return client.shutdown(Shutdown::Both),
        (Manner::Refuse, _) => return refuse(client, "403 Forbidden", "InvalidAccessKeyId"),
        (_, Some(Trouble::Internal)) => return refuse(client, "500 Internal Error", "InternalError"),
        (_, Some(Trouble::SlowDown)) => return refuse(client, "503 Slow Down", "SlowDown"),
        (_, Some(Trouble::Conflict)) => return refuse(client, "409 Conflict", "ConditionalRequestConflict"),
        (_, Some(Trouble::Late)) => thread::sleep(LATE),
        _ => {}
    }
    let kept = lines.filter(|line| {
        let ignored = is_condition(line) && manner == Manner::IgnoreConditions;
        !line.is_empty() && name(line) != "connection" && !ignored
    });
    let head = kept.fold(format!("{request}\r\nConnection: close\r\n"), |head, line| head + line + "\r\n");
    let mut upstream = TcpStream::connect(server)?;
    upstream.write_all(format!("{head}\r\n").as_bytes())?;
    upstream.write_all(&rest)?;
    let (mut from_client, mut to_server) = (client.try_clone()?, upstream.try_clone()?);
    let body = thread::spawn(move || io::copy(&mut from_client, &mut to_server));
    answer(&mut upstream, &mut client, trouble)?;
    client.shutdown(Shutdown::Both)?;
    drop(body.join());
    Ok(())
}

/// Passes the answer on, as much of it as `trouble` leaves.
fn answer(upstream: &mut TcpStream, client: &mut TcpStream, trouble: Option<Trouble>) -> io::Result<()> {
    match trouble {
        Some(Trouble::AnswerLost) => io::copy(upstream, &mut io::sink()).map(drop),
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

/// Answers with an error of S3 without doing anything.
fn refuse(mut client: TcpStream, status: &str, code: &str) -> io::Result<()> {
    let body = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code>\
         <Message>This is a test of troubles.</Message></Error>"
    );
    let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/xml");
    write!(client, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len())?;
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
        door.set(Manner::Few(1));
        assert!(ask(&door).starts_with("HTTP/1.1 200"));
        assert_eq!(ask(&door), "");
        assert_eq!(door.take_conditions(), ["If-None-Match: *"; 6]);
        assert_eq!(door.take_requests(), ["PUT /b/k bytes=3-9"; 6]);
        assert!(door.take_requests().is_empty());
    }

    #[test]
    fn every_trouble_comes_and_shows() {
        let door = Door::new(echo()).expect("door");
        door.set(Manner::Pass);
        let whole = ask(&door);
        door.trouble(1, 100);
        for _ in 0..100 {
            let before = door.troubles();
            let answer = ask(&door);
            let after = door.troubles();
            let trouble = Trouble::ALL.into_iter().find(|trouble| before.get(trouble) != after.get(trouble));
            match trouble.expect("one came") {
                Trouble::Internal => assert!(answer.starts_with("HTTP/1.1 500"), "{answer}"),
                Trouble::SlowDown => assert!(answer.starts_with("HTTP/1.1 503"), "{answer}"),
                Trouble::Conflict => assert!(answer.starts_with("HTTP/1.1 409"), "{answer}"),
                Trouble::Closed | Trouble::AnswerLost => assert_eq!(answer, ""),
                Trouble::AnswerCut => assert!(whole.starts_with(&answer) && answer.len() < whole.len()),
                Trouble::Late => assert_eq!(answer, whole),
            }
        }
        assert_eq!(door.troubles().len(), Trouble::ALL.len());
    }
}
