//! A door between Forebay and a store's server, which a test can shut, and which counts who goes through.
//!
//! Speaks just enough HTTP/1.1: one request a connection, heads rewritten, bodies passed on as they come.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Longest head of a request, in bytes.
const HEAD_MAX: usize = 64 << 10;

/// What happens to a request at the door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// It goes through.
    Pass,
    /// It goes through without its conditions (`If-Match`, `If-None-Match`), as if the store ignored them.
    IgnoreConditions,
    /// It is answered as a store answers unknown credentials.
    Refuse,
    /// Its connection is closed without an answer.
    Shut,
}

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
}

impl Door {
    /// Listens on a free port of the loopback in front of `server`.
    pub fn new(server: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let state = Arc::new(Mutex::new(State { manner: Manner::Pass, requests: Vec::new() }));
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

    /// Takes the requests seen since the last call, each as `METHOD /path?query`.
    pub fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.state).requests)
    }
}

fn lock(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(mut client: TcpStream, server: SocketAddr, state: &Mutex<State>) -> io::Result<()> {
    let (head, rest) = read_head(&mut client)?;
    let mut lines = head.split("\r\n");
    let request = lines.next().unwrap_or_default();
    let manner = {
        let mut state = lock(state);
        state.requests.push(request.trim_end_matches(" HTTP/1.1").to_owned());
        state.manner
    };
    match manner {
        Manner::Shut => return client.shutdown(Shutdown::Both),
        Manner::Refuse => return refuse(client),
        Manner::Pass | Manner::IgnoreConditions => {}
    }
    let name = |line: &str| line.split(':').next().unwrap_or_default().to_ascii_lowercase();
    let kept = lines.filter(|line| match name(line).as_str() {
        "connection" => false,
        "if-match" | "if-none-match" => manner == Manner::Pass,
        _ => !line.is_empty(),
    });
    let head = kept.fold(format!("{request}\r\nConnection: close\r\n"), |head, line| head + line + "\r\n");
    let mut upstream = TcpStream::connect(server)?;
    upstream.write_all(format!("{head}\r\n").as_bytes())?;
    upstream.write_all(&rest)?;
    let (mut from_client, mut to_server) = (client.try_clone()?, upstream.try_clone()?);
    let body = thread::spawn(move || io::copy(&mut from_client, &mut to_server));
    io::copy(&mut upstream, &mut client)?;
    client.shutdown(Shutdown::Both)?;
    drop(body.join());
    Ok(())
}

/// The head of a request, and what came with it of the body.
fn read_head(client: &mut TcpStream) -> io::Result<(String, Vec<u8>)> {
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

fn refuse(mut client: TcpStream) -> io::Result<()> {
    let body = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>InvalidAccessKeyId</Code>\
                <Message>The access key Id you provided does not exist in our records.</Message></Error>";
    let length = body.len();
    let head = "HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Type: application/xml";
    write!(client, "{head}\r\nContent-Length: {length}\r\n\r\n{body}")?;
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
        let request = "PUT /b/k HTTP/1.1\r\nHost: x\r\nIf-None-Match: *\r\nContent-Length: 0\r\n\r\n";
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
        assert_eq!(door.take_requests(), ["PUT /b/k"; 4]);
        assert!(door.take_requests().is_empty());
    }
}
