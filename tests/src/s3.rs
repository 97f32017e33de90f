//! Real S3 servers for tests: moto for semantics, and a fast one for volume.
//!
//! A server belongs to the test that started it, or to the whole test program through [`Server::shared`].

use std::net::SocketAddr;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use forebay_io::object::{Bucket, BucketUrl, StoreSettings};

use crate::server::{Program, run, venv};
use crate::settings::tool;

/// The credentials of every server.
const KEY: &str = "forebay-test-key";
const SECRET: &str = "forebay-test-secret";

/// A running S3 server.
#[derive(Debug)]
pub struct Server {
    program: Program,
    kind: Kind,
    buckets: AtomicU32,
    accounts: AtomicU32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Moto,
    Fast,
}

impl Server {
    /// Starts moto: every semantic of S3 that Forebay uses, slow for volume, checks no credentials.
    ///
    /// # Panics
    /// When moto is not installed: `make setup` installs it.
    pub fn start() -> Self {
        let moto = venv().join("bin/moto_server");
        assert!(moto.exists(), "{} is missing: run `make setup`", moto.display());
        let program = Program::start(&venv().join("bin/python"), &[], |port, _| {
            let script = concat!(env!("CARGO_MANIFEST_DIR"), "/src/one_at_a_time.py");
            [script, "-H", "127.0.0.1", "-p", &port.to_string()].map(str::to_owned).to_vec()
        });
        Self::over(program, Kind::Moto)
    }

    /// Starts versitygw: fast, checks credentials, keeps objects as files. `None`, and says so, where it is not
    /// installed.
    pub fn fast() -> Option<Self> {
        let program = tool("versitygw", "s3::Server::fast")?;
        let root = [("ROOT_ACCESS_KEY", KEY), ("ROOT_SECRET_KEY", SECRET)];
        let program = Program::start(&program, &root, |port, scratch| {
            let folder = |name: &str| {
                let folder = scratch.join(name);
                std::fs::create_dir_all(&folder).expect("a folder can be made");
                folder.display().to_string()
            };
            let listen = format!("127.0.0.1:{port}");
            let (accounts, data) = (folder("accounts"), folder("data"));
            ["--port", &listen, "--keep-alive", "--quiet", "--iam-dir", &accounts, "posix", &data]
                .map(str::to_owned)
                .to_vec()
        });
        Some(Self::over(program, Kind::Fast))
    }

    /// Starts the fast server where it is installed, else moto: for what needs S3 and moves much data.
    pub fn for_volume() -> Self {
        Self::fast().unwrap_or_else(Self::start)
    }

    /// The moto server of this test program, started on first use.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    fn over(program: Program, kind: Kind) -> Self {
        Self { program, kind, buckets: AtomicU32::new(0), accounts: AtomicU32::new(0) }
    }

    /// Kills the server and starts it again with all its objects: requests that it was carrying out end. Those of a
    /// client that died would otherwise go on. The fast server only: moto keeps objects in memory.
    pub fn restart(&self) {
        assert!(self.kind == Kind::Fast, "moto would forget everything");
        self.program.restart();
    }

    /// Whether it keeps its objects when it is restarted.
    pub fn keeps_objects(&self) -> bool {
        self.kind == Kind::Fast
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.program.address()
    }

    /// Where it listens, as a URL.
    pub fn endpoint(&self) -> String {
        self.program.endpoint()
    }

    /// Creates a bucket of its own for a test and returns its name.
    pub fn create_bucket(&self) -> String {
        let name = format!("test-{}", self.buckets.fetch_add(1, Ordering::Relaxed));
        match self.kind {
            Kind::Moto => {
                let answer = self.program.request(&format!("PUT /{name}"), "").expect("the server answers");
                assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            }
            // A directory is a bucket.
            Kind::Fast => drop(self.program.scratch.folder(&format!("data/{name}"))),
        }
        name
    }

    /// Puts an empty object at `/BUCKET/KEY`, URL-encoded, whatever the key. moto only.
    pub fn put_raw(&self, path: &str) {
        let answer = self.program.request(&format!("PUT /{path}"), "").expect("the server answers");
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }

    /// Puts an object at `/BUCKET/KEY` that anybody may read. moto only.
    pub fn put_public(&self, path: &str, body: &str) {
        let public = "x-amz-acl: public-read\r\n";
        let answer = self.program.request_with(&format!("PUT /{path}"), public, body);
        let answer = answer.expect("the server answers");
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }

    /// Puts an object at `/BUCKET/KEY` that is archived at once. moto only.
    pub fn put_archived(&self, path: &str, body: &str) {
        let class = "x-amz-storage-class: GLACIER\r\n";
        let answer =
            self.program.request_with(&format!("PUT /{path}"), class, body).expect("the server answers");
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }

    /// The storage class of the object at `/BUCKET/KEY`, URL-encoded, as S3 says it: nothing for the usual one. moto only.
    pub fn storage_class(&self, path: &str) -> Option<String> {
        // It looks at who asks, not at the signature.
        let login = "Authorization: AWS4-HMAC-SHA256 Credential=test/20200101/us-east-1/s3/aws4_request, \
            SignedHeaders=host, Signature=0\r\n";
        let head = self.program.request_with(&format!("HEAD /{path}"), login, "");
        let answer = head.expect("the server answers");
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
        let header = |line: &str| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("x-amz-storage-class").then(|| value.trim().to_owned())
        };
        answer.lines().find_map(header).filter(|class| class != "STANDARD")
    }

    /// The settings with which `Bucket::open` reaches it.
    pub fn settings(&self) -> StoreSettings {
        let options = [
            ("aws_endpoint", self.endpoint()),
            ("aws_region", "us-east-1".to_owned()),
            ("aws_access_key_id", KEY.to_owned()),
            ("aws_secret_access_key", SECRET.to_owned()),
        ];
        let options = options.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        StoreSettings { options, ..StoreSettings::default() }
    }

    /// The environment with which a `forebay` process reaches it.
    pub fn envs(&self) -> Vec<(String, String)> {
        self.envs_at(self.endpoint())
    }

    /// The same, by way of `endpoint`: that of a door in front of it.
    pub fn envs_at(&self, endpoint: String) -> Vec<(String, String)> {
        Self::envs_of(endpoint, KEY)
    }

    fn envs_of(endpoint: String, key: &str) -> Vec<(String, String)> {
        let variables = [
            ("AWS_ENDPOINT_URL", endpoint),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", key.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
        ];
        variables.map(|(name, value)| (name.to_owned(), value)).to_vec()
    }

    /// Makes an account that may do `actions` in `bucket`, such as `s3:GetObject`, and nothing else; returns the
    /// environment with which a `forebay` process has its credentials. The fast server only.
    pub fn account(&self, bucket: &str, actions: &[&str]) -> Vec<(String, String)> {
        assert!(self.kind == Kind::Fast, "moto checks no credentials");
        let name = format!("account-{}", self.accounts.fetch_add(1, Ordering::Relaxed));
        let login = ["--access", KEY, "--secret", SECRET, "--endpoint-url", &self.endpoint()];
        let user = ["create-user", "--access", &name, "--secret", SECRET, "--role", "user"];
        let gateway = tool("versitygw", "s3::Server::account").expect("it runs");
        run(Command::new(gateway).arg("admin").args(login).args(user));
        let policy = format!(
            r#"{{"Version":"2012-10-17","Statement":[{{"Effect":"Allow","Principal":{{"AWS":["{name}"]}},
            "Action":{actions:?},"Resource":["arn:aws:s3:::{bucket}","arn:aws:s3:::{bucket}/*"]}}]}}"#
        );
        let python = "import boto3, os, sys; s3 = boto3.client('s3', region_name=os.environ['AWS_REGION']); \
            s3.put_bucket_policy(Bucket=sys.argv[1], Policy=sys.argv[2])";
        run(Command::new(venv().join("bin/python")).args(["-c", python, bucket, &policy]).envs(self.envs()));
        Self::envs_of(self.endpoint(), &name)
    }

    /// Copies every object below `from` (`BUCKET/PREFIX/`) to the same place below `to`, in parts of another size than
    /// Forebay's: what tools that copy in parts make, where ETags are others.
    pub fn copy_in_parts(&self, from: &str, to: &str) {
        let python = r"
import boto3, os, sys
s3 = boto3.client('s3', region_name=os.environ['AWS_REGION'])
(source, below), (target, place) = [argument.split('/', 1) for argument in sys.argv[1:]]
for page in s3.get_paginator('list_objects_v2').paginate(Bucket=source, Prefix=below):
    for found in page.get('Contents', []):
        body = s3.get_object(Bucket=source, Key=found['Key'])['Body'].read()
        to = dict(Bucket=target, Key=place + found['Key'][len(below):])
        if not body:
            s3.put_object(**to, Body=body)
            continue
        upload = dict(**to, UploadId=s3.create_multipart_upload(**to)['UploadId'])
        pieces = [body[at:at + (6 << 20)] for at in range(0, len(body), 6 << 20)]
        put = lambda number, piece: s3.upload_part(**upload, PartNumber=number, Body=piece)['ETag']
        parts = [dict(PartNumber=n, ETag=put(n, piece)) for n, piece in enumerate(pieces, 1)]
        s3.complete_multipart_upload(**upload, MultipartUpload=dict(Parts=parts))
";
        run(Command::new(venv().join("bin/python")).args(["-c", python, from, to]).envs(self.envs()));
    }

    /// A handle on a new bucket, below `prefix` in it.
    pub async fn bucket(&self, prefix: &str) -> Bucket {
        let url: BucketUrl = format!("s3://{}/{prefix}", self.create_bucket()).parse().expect("a valid URL");
        let opened = Bucket::open(&url, &self.settings()).await;
        opened.unwrap_or_else(|error| panic!("{error}\n{}", self.program.log()))
    }

    /// Ends the server, as a crash would.
    pub fn kill(mut self) {
        self.program.end();
    }
}
