//! Servers that speak the protocols of Google Cloud Storage and Azure Blob Storage: fake-gcs-server, which takes no
//! writes in the protocol that Forebay writes with, moto behind an interpreter of ours, which does, and Azurite.
//!
//! `make setup` installs fake-gcs-server and Azurite where Go and npm are; without them, tests over these stores say
//! that they are skipped.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use forebay_io::object::{Bucket, BucketUrl, StoreSettings};

use crate::dialect::Dialect;
use crate::s3::Server;
use crate::server::{Program, run, venv};
use crate::settings::tool;

/// The account that Azurite comes with, and its key: both are in its documentation.
const ACCOUNT: &str = "devstoreaccount1";
const ACCOUNT_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// Creates a container of Azurite's: object_store has no request for that. Arguments: endpoint, account, key, name, and a header
/// that says what anybody may read, if anything.
const CREATE_CONTAINER: &str = r#"
import base64, hashlib, hmac, sys, urllib.request
from email.utils import formatdate
endpoint, account, key, name, access = sys.argv[1:]
date, version = formatdate(usegmt=True), "2021-08-06"
signed = f"PUT\n\n\n\n\n\n\n\n\n\n\n\n{access}x-ms-date:{date}\nx-ms-version:{version}\n/{account}/{account}/{name}\nrestype:container"
digest = hmac.new(base64.b64decode(key), signed.encode(), hashlib.sha256).digest()
headers = {"x-ms-date": date, "x-ms-version": version, "Content-Length": "0",
           "Authorization": f"SharedKey {account}:{base64.b64encode(digest).decode()}"}
headers.update(line.split(":") for line in access.split())
url = f"{endpoint}/{account}/{name}?restype=container"
urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers))
"#;

/// A running server of a cloud other than Amazon's.
#[derive(Debug)]
pub struct Cloud {
    server: Behind,
    address: SocketAddr,
    kind: Kind,
    buckets: AtomicU32,
}

/// What keeps the objects.
#[derive(Debug)]
enum Behind {
    Own(Program),
    Moto(&'static Server),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Google,
    Azure,
}

impl Cloud {
    /// The fake-gcs-server of this test program, started on first use.
    pub fn google() -> Option<&'static Self> {
        static SHARED: OnceLock<Option<Cloud>> = OnceLock::new();
        SHARED.get_or_init(Self::start_google).as_ref()
    }

    /// The moto of this test program as Google would answer for it.
    pub fn google_in_dialect() -> &'static Self {
        static SHARED: OnceLock<Cloud> = OnceLock::new();
        SHARED.get_or_init(|| {
            let server = Server::shared();
            let dialect = Dialect::new(server.address()).expect("loopback has free ports");
            Self::over(Behind::Moto(server), dialect.address, Kind::Google)
        })
    }

    /// The Azurite of this test program, started on first use.
    pub fn azure() -> Option<&'static Self> {
        static SHARED: OnceLock<Option<Cloud>> = OnceLock::new();
        SHARED.get_or_init(Self::start_azure).as_ref()
    }

    fn start_google() -> Option<Self> {
        let program = tool("fake-gcs-server", "cloud::Cloud::google")?;
        let arguments = |port: u16, _: &Path| {
            let port = port.to_string();
            let public = format!("127.0.0.1:{port}");
            let server = ["-scheme", "http", "-host", "127.0.0.1", "-port", &port, "-public-host", &public];
            server.into_iter().chain(["-backend", "memory"]).map(str::to_owned).collect()
        };
        Some(Self::own(Program::start(&program, &[], arguments), Kind::Google))
    }

    fn start_azure() -> Option<Self> {
        let program = tool("azurite/node_modules/.bin/azurite-blob", "cloud::Cloud::azure")?;
        let arguments = |port: u16, scratch: &Path| {
            let (port, data) = (port.to_string(), scratch.display().to_string());
            let server = ["--blobHost", "127.0.0.1", "--blobPort", &port, "--location", &data];
            // The client's version of the protocol is newer than what it knows.
            server.into_iter().chain(["--silent", "--skipApiVersionCheck"]).map(str::to_owned).collect()
        };
        // No statistics leave the machine.
        let variables = [("AZURITE_TELEMETRY_DISABLED", "1"), ("AZURE_CORE_COLLECT_TELEMETRY", "0")];
        Some(Self::own(Program::start(&program, &variables, arguments), Kind::Azure))
    }

    fn own(program: Program, kind: Kind) -> Self {
        let address = program.address();
        Self::over(Behind::Own(program), address, kind)
    }

    fn over(server: Behind, address: SocketAddr, kind: Kind) -> Self {
        Self { server, address, kind, buckets: AtomicU32::new(0) }
    }

    /// Where it listens, for a door in front of it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    fn log(&self) -> String {
        match &self.server {
            Behind::Own(program) => program.log(),
            Behind::Moto(_) => String::new(),
        }
    }

    /// Options by their object_store names.
    fn options(&self, endpoint: String) -> Vec<(String, String)> {
        let options = match self.kind {
            Kind::Google => {
                let account =
                    r#"{"disable_oauth":true,"client_email":"","private_key":"","private_key_id":""}"#;
                vec![("google_base_url", endpoint), ("google_service_account_key", account.to_owned())]
            }
            Kind::Azure => vec![
                ("azure_storage_account_name", ACCOUNT.to_owned()),
                ("azure_storage_account_key", ACCOUNT_KEY.to_owned()),
                ("azure_storage_endpoint", format!("{endpoint}/{ACCOUNT}")),
            ],
        };
        options.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// The environment with which a `forebay` process reaches it.
    pub fn envs(&self) -> Vec<(String, String)> {
        self.envs_at(self.endpoint())
    }

    /// The same through `endpoint`, which leads to it.
    pub fn envs_at(&self, endpoint: String) -> Vec<(String, String)> {
        self.options(endpoint).into_iter().map(|(name, value)| (name.to_ascii_uppercase(), value)).collect()
    }

    /// Puts an object as a program that speaks Google's JSON protocol does, which is how fake-gcs-server is written to.
    pub fn put_json(&self, bucket: &Bucket, key: &str, body: &str) {
        let (bucket, prefix) = (&bucket.url().bucket, &bucket.url().prefix);
        let line = format!("POST /upload/storage/v1/b/{bucket}/o?uploadType=media&name={prefix}/{key}");
        let Behind::Own(program) = &self.server else { panic!("moto speaks no JSON") };
        let answer = program.request(&line, body).expect("the server answers");
        assert!(answer.starts_with("HTTP/1.1 200"), "{key}: {answer}");
    }

    /// Creates a bucket of its own for a test and returns a handle on it, below `prefix`.
    pub async fn bucket(&self, prefix: &str) -> Bucket {
        self.bucket_at(&self.create_bucket(prefix)).await
    }

    /// A handle on a bucket that was created.
    pub async fn bucket_at(&self, url: &BucketUrl) -> Bucket {
        self.open(url, self.endpoint()).await
    }

    /// A handle on a bucket, through an endpoint that leads here.
    pub async fn open(&self, url: &BucketUrl, endpoint: String) -> Bucket {
        let opened = Bucket::open(url, &self.settings_at(endpoint)).await;
        opened.unwrap_or_else(|error| panic!("{error}\n{}", self.log()))
    }

    /// The settings with which `Bucket::open` reaches it through `endpoint`.
    pub fn settings_at(&self, endpoint: String) -> StoreSettings {
        let options = self.options(endpoint).into_iter().collect();
        StoreSettings { options, ..StoreSettings::default() }
    }

    /// The same without an account's key.
    pub fn anonymous_settings(&self) -> StoreSettings {
        let is_key = |name: &str| name.ends_with("_key");
        let options = self.options(self.endpoint()).into_iter().filter(|(name, _)| !is_key(name)).collect();
        StoreSettings { anonymous: true, options, ..StoreSettings::default() }
    }

    /// Creates a bucket of its own for a test. Returns the URL of its `prefix`.
    pub fn create_bucket(&self, prefix: &str) -> BucketUrl {
        self.create(prefix, false)
    }

    /// The same, which anybody may read.
    pub fn create_public_bucket(&self, prefix: &str) -> BucketUrl {
        self.create(prefix, true)
    }

    fn create(&self, prefix: &str, is_public: bool) -> BucketUrl {
        let mut name = format!("test-{}", self.buckets.fetch_add(1, Ordering::Relaxed));
        let scheme = match (self.kind, &self.server) {
            (Kind::Google, Behind::Own(program)) => {
                let body = format!(r#"{{"name":"{name}"}}"#);
                let made = program.request("POST /storage/v1/b?project=test", &body);
                let answer = made.expect("the server answers");
                assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
                "gs"
            }
            (Kind::Google, Behind::Moto(server)) => {
                name = server.create_bucket();
                "gs"
            }
            (Kind::Azure, _) => {
                let access = if is_public { "x-ms-blob-public-access:container\n" } else { "" };
                let line = ["-c", CREATE_CONTAINER, &self.endpoint(), ACCOUNT, ACCOUNT_KEY, &name, access];
                run(Command::new(venv().join("bin/python")).args(line));
                "az"
            }
        };
        format!("{scheme}://{name}/{prefix}").parse().expect("a valid URL")
    }
}
