//! Google's dialect of S3's protocol, in front of a server that speaks S3's own.
//!
//! No server that can be installed here takes writes in Google's XML protocol, which is S3's but for some headers:
//! conditions of writes and versions are generations, metadata and copies have other names, uploads in parts take no
//! conditions, and a copy takes one. This puts the headers of one into those of the other. What is checked, kept and
//! listed is the server's doing; a generation is made from an ETag, so that equal bytes have the same one.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::door::read_head;

/// Held by a write with a condition.
static TURN: Mutex<()> = Mutex::new(());

/// A listening interpreter; it stops with the test's process.
#[derive(Debug)]
pub(crate) struct Dialect {
    pub(crate) address: SocketAddr,
}

/// A message of HTTP/1.1, its head in lines.
struct Message {
    first: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Dialect {
    /// Listens on a free port of the loopback in front of `server`.
    pub(crate) fn new(server: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                thread::spawn(move || serve(client, server).ok());
            }
        });
        Ok(Self { address })
    }
}

fn serve(mut client: TcpStream, server: SocketAddr) -> io::Result<()> {
    let (head, body) = read_head(&mut client)?;
    let mut request = Message::of(&head, body);
    let length = request.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    let mut rest = vec![0; usize::saturating_sub(length, request.body.len())];
    client.read_exact(&mut rest)?;
    request.body.append(&mut rest);
    let is_head = request.first.starts_with("HEAD");
    client.write_all(&answer(request, server)?.bytes(is_head))?;
    client.shutdown(Shutdown::Both)
}

/// What Google would answer.
fn answer(mut request: Message, server: SocketAddr) -> io::Result<Message> {
    request.first = plain(&request.first);
    request.headers.retain(|(name, _)| name != "authorization");
    request.headers.push(login());
    request.rename("x-goog-meta-", "x-amz-meta-");
    request.rename("x-goog-storage-class", "x-amz-storage-class");
    let generation = request.take("x-goog-if-generation-match");
    // moto looks first and writes then: of writes with conditions there is one at a time.
    let _turn = generation.as_ref().map(|_| TURN.lock().unwrap_or_else(PoisonError::into_inner));
    let is_upload = request.first.contains("?uploads") || request.first.contains("uploadId=");
    if generation.is_some() && is_upload {
        return Ok(Message::error("400 Bad Request", "NotImplemented"));
    }
    match generation.as_deref() {
        None => {}
        Some("0") => request.headers.push(("if-none-match".into(), "*".into())),
        Some(wanted) => {
            let head = Message::request("HEAD", request.target());
            let held = ask(head, server)?.header("etag").map(str::to_owned);
            match held.filter(|tag| generation_of(tag) == wanted) {
                Some(tag) => request.headers.push(("if-match".into(), tag)),
                None => return Ok(Message::error("412 Precondition Failed", "PreconditionFailed")),
            }
        }
    }
    let is_copy = match request.take("x-goog-copy-source") {
        Some(source) => {
            let found = ask(Message::request("GET", &plain(&format!("/{source}"))), server)?;
            if !found.first.contains(" 200 ") {
                return Ok(found);
            }
            let kept = found.headers.into_iter();
            let kept = kept.filter(|(name, _)| name.starts_with("x-amz-meta-") || name == "content-type");
            request.headers.extend(kept);
            request.body = found.body;
            true
        }
        None => false,
    };
    let mut answer = ask(request, server)?;
    if is_upload && answer.first.contains(" 500 ") {
        // moto fails where there is no such upload.
        return Ok(Message::error("404 Not Found", "NoSuchUpload"));
    }
    answer.rename("x-amz-meta-", "x-goog-meta-");
    if let Some(tag) = answer.header("etag").map(str::to_owned) {
        answer.headers.push(("x-goog-generation".into(), generation_of(&tag)));
        if is_copy {
            let result = format!("<ETag>{}</ETag>", tag.replace('"', "&quot;"));
            answer.body = format!("<CopyObjectResult>{result}</CopyObjectResult>").into_bytes();
        }
    }
    Ok(answer)
}

/// moto looks at who asks, not at the signature.
fn login() -> (String, String) {
    let scope = "Credential=test/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0";
    ("authorization".into(), format!("AWS4-HMAC-SHA256 {scope}"))
}

/// Spells hyphens and the like as they are: moto does not know a bucket by another spelling of its name.
fn plain(target: &str) -> String {
    let spelled = [("%2D", "-"), ("%2E", "."), ("%5F", "_"), ("%7E", "~")];
    spelled.into_iter().fold(target.to_owned(), |text, (from, to)| text.replace(from, to))
}

/// One request to the server, whose connection ends with the answer.
fn ask(request: Message, server: SocketAddr) -> io::Result<Message> {
    let mut stream = TcpStream::connect(server)?;
    stream.write_all(&request.bytes(false))?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    let end =
        bytes.windows(4).position(|window| window == b"\r\n\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
    let body = bytes.split_off(end + 4);
    Ok(Message::of(&String::from_utf8_lossy(&bytes), body))
}

/// A number for an ETag, never 0.
fn generation_of(tag: &str) -> String {
    // FNV-1a, of which a sign bit fewer is kept, as generations are.
    let sum = tag
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    ((sum >> 1) | 1).to_string()
}

impl Message {
    fn of(head: &str, body: Vec<u8>) -> Self {
        let mut lines = head.split("\r\n").filter(|line| !line.is_empty());
        let first = lines.next().unwrap_or_default().to_owned();
        let header = |line: &str| {
            let (name, value) = line.split_once(':')?;
            Some((name.to_ascii_lowercase(), value.trim().to_owned()))
        };
        Self { first, headers: lines.filter_map(header).collect(), body }
    }

    fn request(method: &str, target: &str) -> Self {
        let mut request = Self::of(&format!("{method} {target} HTTP/1.1\r\nhost: localhost"), Vec::new());
        request.headers.push(login());
        request
    }

    fn error(status: &str, code: &str) -> Self {
        let body =
            format!("<?xml version='1.0'?><Error><Code>{code}</Code><Message>a test</Message></Error>");
        Self::of(&format!("HTTP/1.1 {status}\r\ncontent-type: application/xml"), body.into_bytes())
    }

    /// The path and query of a request.
    fn target(&self) -> &str {
        self.first.split(' ').nth(1).unwrap_or_default()
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.headers.iter().position(|(known, _)| known == name)?;
        Some(self.headers.remove(at).1)
    }

    fn rename(&mut self, from: &str, to: &str) {
        for (name, _) in &mut self.headers {
            if let Some(rest) = name.strip_prefix(from) {
                *name = format!("{to}{rest}");
            }
        }
    }

    /// As it goes over the wire, the last on its connection. An answer to HEAD has no body and keeps its length.
    fn bytes(&self, is_answer_to_head: bool) -> Vec<u8> {
        let mut text = format!("{}\r\nconnection: close\r\n", self.first);
        for (name, value) in &self.headers {
            let is_kept = name != "connection" && (name != "content-length" || is_answer_to_head);
            text.extend(is_kept.then(|| format!("{name}: {value}\r\n")));
        }
        let length = (!is_answer_to_head).then(|| format!("content-length: {}\r\n", self.body.len()));
        text.extend(length);
        text.push_str("\r\n");
        [text.as_bytes(), &self.body].concat()
    }
}
