//! The AWS credential chain, from files and environment to requests that a store accepts: each case runs the binary
//! with a home of its own and no keys in its environment.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use forebay_core::ObjectKey;
use forebay_io::object::{Bucket, Condition};
use forebay_tests::s3::Server;
use forebay_tests::{Door, Forebay, Mount, Outcome, Scratch, require_fuse, shell};

/// Longest that credentials may take to be renewed.
const DEADLINE: Duration = Duration::from_secs(60);
/// With what moto's token service begins its temporary keys.
const TEMPORARY: &str = "ASIA";

/// A bucket of a moto server behind a door, and a home with profiles.
struct Place {
    scratch: Scratch,
    door: Door,
    bucket: Bucket,
}

impl Place {
    async fn new(profiles: &str) -> Self {
        let server = Server::shared();
        let address = server.endpoint().trim_start_matches("http://").parse().expect("an address");
        let door = Door::new(address).expect("loopback has free ports");
        let (scratch, bucket) = (Scratch::new(), server.bucket("").await);
        std::fs::write(scratch.folder("home/.aws").join("config"), profiles).expect("writable");
        std::fs::write(scratch.join("token"), "a token").expect("writable");
        Self { scratch, door, bucket }
    }

    /// `forebay doctor` on the bucket with these variables besides the store's endpoint.
    fn doctor(&self, variables: &[(&str, &str)]) -> Outcome {
        self.run("doctor", &["--read-only"], variables)
    }

    /// A command on the bucket with these options and variables besides.
    fn run(&self, command: &str, options: &[&str], variables: &[(&str, &str)]) -> Outcome {
        let owned = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let endpoint = ("AWS_ENDPOINT_URL".to_owned(), self.door.endpoint());
        let variables: Vec<_> = [endpoint].into_iter().chain(owned).collect();
        let url = self.bucket.url().to_string();
        let state = self.scratch.path().to_str().expect("text");
        let line = [&[command, &url, "--state-dir", state], options].concat();
        Forebay::new(&self.scratch.join("home"), line).envs(&variables).run()
    }
}

/// Whether `text` says that the bucket was reached; a host without FUSE fails other checks.
fn reached(outcome: &Outcome) -> bool {
    outcome.stdout.contains("is there and can be listed")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_profile_that_assumes_a_role() {
    let profiles = "[profile base]\naws_access_key_id = base-key\naws_secret_access_key = s\n\
        [profile role]\nrole_arn = arn:aws:iam::123456789012:role/reader\nsource_profile = base\n\
        region = us-east-1\n";
    let place = Place::new(profiles).await;
    let outcome = place.doctor(&[("AWS_PROFILE", "role")]);
    assert!(reached(&outcome), "{outcome}");
    let (keys, requests) = (place.door.keys(), place.door.take_requests());
    assert_eq!(requests[0], "POST /", "the role is asked for first and once: {requests:?}");
    assert!(keys[1].starts_with(TEMPORARY) && !requests[1..].contains(&"POST /".to_owned()), "{requests:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_web_identity_of_a_profile_or_of_the_environment() {
    let place = Place::new("").await;
    let token = place.scratch.join("token").display().to_string();
    let role = "arn:aws:iam::123456789012:role/pod";
    let profile =
        format!("[profile pod]\nrole_arn = {role}\nweb_identity_token_file = {token}\nregion = us-east-1\n");
    std::fs::write(place.scratch.join("home/.aws/config"), profile).expect("writable");
    let environment = [
        ("AWS_WEB_IDENTITY_TOKEN_FILE", token.as_str()),
        ("AWS_ROLE_ARN", role),
        ("AWS_REGION", "us-east-1"),
    ];
    for variables in [&[("AWS_PROFILE", "pod")][..], &environment] {
        let outcome = place.doctor(variables);
        assert!(reached(&outcome), "{outcome}");
        let (keys, requests) = (place.door.keys(), place.door.take_requests());
        assert_eq!(requests[0], "POST /", "{requests:?}");
        assert!(keys[1].starts_with(TEMPORARY), "{keys:?}");
    }
    std::fs::remove_file(&token).expect("it is there");
    let refused = place.doctor(&environment);
    assert!(refused.stdout.contains("no credentials for") && refused.stdout.contains(&token), "{refused}");
    assert!(refused.stdout.contains("hint: check AWS_WEB_IDENTITY_TOKEN_FILE"), "{refused}");
}

/// A person logs in with `aws sso login`, which leaves a token in `~/.aws/sso/cache`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_profile_with_a_login() {
    let profiles = "[profile login]\nsso_start_url = https://login\nsso_region = us-east-1\nregion = us-east-1\n\
        sso_account_id = 123456789012\nsso_role_name = reader\n";
    let place = Place::new(profiles).await;
    let portal = portal();
    let variables = [("AWS_PROFILE", "login"), ("AWS_ENDPOINT_URL_SSO", portal.as_str())];
    let refused = place.doctor(&variables);
    assert!(refused.stdout.contains("AWS profile `login`"), "{refused}");
    assert!(refused.stdout.contains("aws sso login"), "{refused}");
    let cache = place.scratch.folder("home/.aws/sso/cache");
    let token = r#"{"accessToken": "a token", "expiresAt": "2099-01-01T00:00:00Z"}"#;
    shell(&cache, &format!("echo '{token}' > $(printf https://login | sha1sum | cut -d' ' -f1).json"))
        .succeeded();
    let outcome = place.doctor(&variables);
    assert!(reached(&outcome), "{outcome}");
    assert_eq!(place.door.keys()[0], "portal-key");
}

/// Answers each request as the login portal answers one for a role's credentials.
fn portal() -> String {
    answering(|request| {
        request.starts_with("GET /federation/credentials?").then_some(
            r#"{"roleCredentials": {"accessKeyId": "portal-key", "secretAccessKey": "s",
                "sessionToken": "t", "expiration": 4070908800000}}"#,
        )
    })
}

/// A service on this host that answers the heads of requests, or refuses them.
fn answering<T: AsRef<str>>(answer: impl Fn(&str) -> Option<T> + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has free ports");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            let head = read_request(&mut client);
            let body = answer(&head.to_ascii_lowercase().replacen("get", "GET", 1));
            let status = if body.is_some() { "200 OK" } else { "404 Not Found" };
            let body = body.as_ref().map(AsRef::as_ref).unwrap_or_default();
            let length = body.len();
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
            );
            // How long a token holds, as an instance's metadata service says it.
            let head = head + "X-Aws-Ec2-Metadata-Token-Ttl-Seconds: 21600\r\n";
            // A client that goes away early fails its own test.
            let _ = write!(client, "{head}Connection: close\r\n\r\n{body}");
        }
    });
    endpoint
}

/// The head of a request, whose body is read and dropped.
fn read_request(client: &mut TcpStream) -> String {
    let (mut reader, mut head, mut length) = (BufReader::new(client), String::new(), 0);
    loop {
        let before = head.len();
        let read = reader.read_line(&mut head).unwrap_or(0);
        let line = head[before..].to_ascii_lowercase();
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
        if read == 0 || line.trim().is_empty() {
            // A client that goes away early fails its own test.
            let _ = io::copy(&mut reader.take(length), &mut io::sink());
            return head;
        }
    }
}

/// As ECS gives them, and EKS by Pod Identity: with a token, of which a file has the present one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_of_a_container() {
    let place = Place::new("").await;
    let endpoint = answering(|request| {
        let is_right = request.starts_with("GET /creds ") && request.contains("authorization: a token");
        is_right.then_some(
            r#"{"AccessKeyId": "container-key", "SecretAccessKey": "s", "Token": "t",
                "Expiration": "2099-01-01T00:00:00Z"}"#,
        )
    });
    let (address, token) = (format!("{endpoint}/creds"), place.scratch.join("token").display().to_string());
    let variables = [
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", address.as_str()),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token.as_str()),
        ("AWS_REGION", "us-east-1"),
    ];
    let outcome = place.doctor(&variables);
    assert!(reached(&outcome), "{outcome}");
    assert_eq!(place.door.keys()[0], "container-key");
    std::fs::write(&token, "of yesterday").expect("writable");
    let refused = place.doctor(&variables);
    assert!(refused.stdout.contains("no credentials for") && refused.stdout.contains(&address), "{refused}");
    assert!(refused.stdout.contains("identity association"), "{refused}");
}

/// The metadata service of an instance, of which a token is asked for first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_of_an_instance() {
    let place = Place::new("").await;
    let endpoint = answering(|request| match request.split(' ').nth(1)? {
        "/latest/api/token" => Some("a token"),
        _ if !request.contains("x-aws-ec2-metadata-token: a token") => None,
        "/latest/meta-data/iam/security-credentials/" => Some("node"),
        "/latest/meta-data/iam/security-credentials/node" => Some(
            r#"{"Code": "Success", "Type": "AWS-HMAC", "LastUpdated": "2026-01-01T00:00:00Z",
                "AccessKeyId": "instance-key", "SecretAccessKey": "s", "Token": "t",
                "Expiration": "2099-01-01T00:00:00Z"}"#,
        ),
        _ => None,
    });
    for name in ["AWS_METADATA_ENDPOINT", "AWS_EC2_METADATA_SERVICE_ENDPOINT"] {
        let outcome = place.doctor(&[(name, endpoint.as_str()), ("AWS_REGION", "us-east-1")]);
        assert!(reached(&outcome), "{outcome}");
        assert_eq!(place.door.keys()[0], "instance-key");
        place.door.take_requests();
    }
    let closed = TcpListener::bind("127.0.0.1:0").and_then(|held| held.local_addr()).expect("an address");
    let silent = TcpListener::bind("127.0.0.1:0").expect("loopback has free ports");
    for address in [closed, silent.local_addr().expect("an address")] {
        let endpoint = format!("http://{address}");
        let refused =
            place.doctor(&[("AWS_METADATA_ENDPOINT", endpoint.as_str()), ("AWS_REGION", "us-east-1")]);
        let told = ["no credentials for", "the instance's metadata service", "set AWS_ACCESS_KEY_ID"];
        assert!(told.iter().all(|text| refused.stdout.contains(text)), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_fails_is_told_with_its_profile() {
    let place =
        Place::new("[profile program]\ncredential_process = /no/such/program\nregion = us-east-1\n").await;
    let refused = place.doctor(&[("AWS_PROFILE", "program")]);
    assert!(
        refused.stdout.contains("AWS profile `program`") && refused.stdout.contains("hint:"),
        "{refused}"
    );
    assert!(place.door.take_requests().is_empty(), "no request goes out without credentials");
}

/// As systemd and mount(8) start it. The profile was found, and not by who was to run its program.
#[test]
fn a_program_of_a_profile_is_run_where_nobody_says_which_the_home_directory_is() {
    let test = "a_program_of_a_profile_is_run_where_nobody_says_which_the_home_directory_is";
    let scratch = Scratch::new();
    if shell(scratch.path(), "unshare --mount true").code != Some(0) {
        return forebay_tests::settings::skip(test, "no mount namespaces");
    }
    let (ran, home, users) = (scratch.join("ran"), scratch.folder("home"), scratch.join("passwd"));
    let profile =
        format!("[profile program]\nregion = us-east-1\ncredential_process = touch {}\n", ran.display());
    std::fs::write(scratch.folder("home/.aws").join("config"), profile).expect("writable");
    std::fs::write(&users, format!("root:x:0:0:root:{}:/bin/sh\n", home.display())).expect("writable");
    let (users, binary) = (users.display(), Forebay::binary().display().to_string());
    let state = scratch.join("state");
    let asked = format!(
        "mount --bind {users} /etc/passwd && exec env -u HOME AWS_PROFILE=program {binary} doctor s3://bucket \
         --state-dir {}",
        state.display()
    );
    let told = shell(scratch.path(), &format!("unshare --mount sh -c '{asked}'"));
    assert!(ran.exists(), "{told}");
    assert!(told.stdout.contains("AWS profile `program`"), "{told}");
}

/// Only a variable of the environment did it, which nobody found.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_that_anybody_may_read_is_read_without_credentials() {
    let place = Place::new("").await;
    Server::shared().put_public(&format!("{}/a", place.bucket.url().bucket), "bytes");
    place.door.accept("", ("403 Forbidden", "AccessDenied"));
    let none = [("AWS_EC2_METADATA_DISABLED", "true"), ("AWS_REGION", "us-east-1")];
    let refused = place.doctor(&none);
    let told = ["no credentials for", "a bucket that anybody may read needs none with --anonymous"];
    assert!(told.iter().all(|text| refused.stdout.contains(text)), "{refused}");
    assert!(place.door.take_requests().is_empty(), "nothing was asked");
    let outcome = place.run("doctor", &["--read-only", "--anonymous"], &none);
    assert!(outcome.stdout.contains("can be listed without credentials"), "{outcome}");
    // Credentials that are there are not used.
    let some = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "s"), ("AWS_REGION", "us-east-1")];
    let cache = place.scratch.folder("cache").display().to_string();
    place.run("warmup", &["--anonymous", "--cache-dir", &cache], &some).succeeded();
    let keys = place.door.keys();
    assert!(!keys.is_empty() && keys.iter().all(String::is_empty), "{keys:?}");
    if require_fuse("a_bucket_that_anybody_may_read_is_read_without_credentials") {
        let variables = [
            ("AWS_ENDPOINT_URL".to_owned(), place.door.endpoint()),
            ("AWS_REGION".to_owned(), "us-east-1".to_owned()),
        ];
        let (folder, url) = (place.scratch.join("mnt"), place.bucket.url().to_string());
        for options in [&["--read-only", "--anonymous"][..], &["-o", "ro,anonymous"]] {
            let mut mount = Mount::new(&place.scratch.join("home"), &url, &folder, options, &variables);
            assert_eq!(std::fs::read(folder.join("a")).expect("read"), b"bytes");
            mount.unmount();
        }
    }
    place.door.accept("key", ("403 Forbidden", "AccessDenied"));
    let refused = place.run("doctor", &["--read-only", "--anonymous"], &none);
    let told =
        ["access to s3://", "is denied", "hint: not anybody may list this bucket: leave out --anonymous"];
    assert!(told.iter().all(|text| refused.stdout.contains(text)), "{refused}");
}

/// A training's keys were read when it was mounted: whoever replaced them, as agents of vaults and sidecars do every few hours,
/// took the bucket away from it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_goes_on_where_the_keys_in_a_file_are_replaced() {
    if !require_fuse("a_mount_goes_on_where_the_keys_in_a_file_are_replaced") {
        return;
    }
    let place = Place::new("").await;
    for name in ["a", "b", "c", "d"] {
        place
            .bucket
            .put(&ObjectKey::new(name), name.to_owned().into(), Condition::Always)
            .await
            .expect("put");
    }
    let file = place.scratch.join("shared");
    let write = |key: &str| {
        let text = format!("[train]\naws_access_key_id = {key}\naws_secret_access_key = s\n");
        std::fs::write(&file, text).expect("writable");
    };
    let variables = [
        ("AWS_ENDPOINT_URL", place.door.endpoint()),
        ("AWS_REGION", "us-east-1".to_owned()),
        ("AWS_PROFILE", "train".to_owned()),
        ("AWS_SHARED_CREDENTIALS_FILE", file.display().to_string()),
    ];
    let variables = variables.map(|(name, value)| (name.to_owned(), value));
    write("key-1");
    place.door.accept("key-1", ("403 Forbidden", "InvalidAccessKeyId"));
    let (home, folder) = (place.scratch.join("home"), place.scratch.join("mnt"));
    let url = place.bucket.url().to_string();
    let mut mount = Mount::new(&home, &url, &folder, &["--read-only"], &variables);
    let read = |name: &str| std::fs::read_to_string(folder.join(name));
    assert_eq!(read("a").expect("with the first key"), "a");
    let rotations = [
        ("b", "key-2", ("403 Forbidden", "InvalidAccessKeyId")),
        ("c", "key-3", ("400 Bad Request", "ExpiredToken")),
    ];
    for (name, key, refusal) in rotations {
        place.door.take_requests();
        write(key);
        place.door.accept(key, refusal);
        assert_eq!(read(name).expect(key), name);
        let keys = place.door.keys();
        assert!(keys.iter().any(|used| used != key), "one is refused, which is how it is known: {keys:?}");
        assert_eq!(keys.last().map(String::as_str), Some(key), "{keys:?}");
    }
    place.door.take_requests();
    place.door.accept("key-4", ("403 Forbidden", "InvalidAccessKeyId"));
    assert_eq!(read("d").expect_err("nobody has that key").kind(), std::io::ErrorKind::PermissionDenied);
    let (keys, failed) = (place.door.keys(), mount.log().matches("request failed").count());
    assert_eq!(keys, vec!["key-3"; failed], "a file that says the same is no reason to ask again");
    mount.unmount();
}

/// The program's credentials live six seconds: a mount asks for new ones in time and goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_renews_what_a_program_gives() {
    if !require_fuse("a_mount_renews_what_a_program_gives") {
        return;
    }
    let Some(server) = Server::fast() else { return };
    let (scratch, bucket) = (Scratch::new(), server.bucket("").await);
    for number in 0..200 {
        let key = ObjectKey::new(format!("{number:03}"));
        bucket.put(&key, "bytes".into(), Condition::Always).await.expect("put");
    }
    let variables = server.envs();
    let value = |name: &str| variables.iter().find(|(key, _)| key == name).expect(name).1.clone();
    let (runs, program) = (scratch.join("runs"), scratch.join("program"));
    let script = format!(
        "#!/bin/sh\necho run $1 >> {}\ncat <<END\n{{\"Version\": 1, \"AccessKeyId\": \"{}\", \
         \"SecretAccessKey\": \"{}\", \"Expiration\": \"$(date -u -d '+6 seconds' +%Y-%m-%dT%H:%M:%SZ)\"}}\nEND\n",
        runs.display(),
        value("AWS_ACCESS_KEY_ID"),
        value("AWS_SECRET_ACCESS_KEY"),
    );
    std::fs::write(&program, script).expect("writable");
    let profile = |run: &str| {
        let profile =
            format!("[default]\nregion = us-east-1\ncredential_process = sh {} {run}\n", program.display());
        std::fs::write(scratch.folder("home/.aws").join("config"), profile).expect("writable");
    };
    profile("first");
    let endpoint = [("AWS_ENDPOINT_URL".to_owned(), server.endpoint())];
    let (home, folder, url) = (scratch.join("home"), scratch.join("mnt"), bucket.url().to_string());
    let mut mount = Mount::new(&home, &url, &folder, &["--read-only"], &endpoint);
    // The profile itself is read anew as well.
    profile("second");
    let ran = || std::fs::read_to_string(&runs).expect("the program ran");
    let started = Instant::now();
    for number in 0..200 {
        let bytes =
            std::fs::read(folder.join(format!("{number:03}"))).expect("a file that was not read before");
        assert_eq!(bytes, b"bytes");
        if ran().contains("run second") {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(
        ran().ends_with("run second\n") && started.elapsed() < DEADLINE,
        "{}{:?}",
        ran(),
        started.elapsed()
    );
    mount.unmount();
}

/// What aws-config found in the files at first it kept: a role whose own keys were replaced could not be assumed any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_is_assumed_with_the_keys_that_stand_in_the_file_by_then() {
    if !require_fuse("a_role_is_assumed_with_the_keys_that_stand_in_the_file_by_then") {
        return;
    }
    let place = Place::new("").await;
    for number in 0..200 {
        let key = ObjectKey::new(format!("{number:03}"));
        place.bucket.put(&key, "bytes".into(), Condition::Always).await.expect("put");
    }
    // Its sessions last six seconds, and are named after the keys that they are asked for with.
    let service = answering(|request| {
        let (_, rest) = request.split_once("credential=")?;
        let key = rest.split('/').next()?;
        let expires = shell("/".as_ref(), "date -u -d '+6 seconds' +%Y-%m-%dT%H:%M:%SZ").succeeded();
        Some(format!(
            "<AssumeRoleResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><AssumeRoleResult><Credentials>\
             <AccessKeyId>of-{key}</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>\
             <Expiration>{}</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>",
            expires.trim()
        ))
    });
    let file = place.scratch.join("home/.aws/config");
    let write = |key: &str| {
        let text = format!(
            "[profile base]\naws_access_key_id = {key}\naws_secret_access_key = s\n[profile role]\n\
             role_arn = arn:aws:iam::123456789012:role/reader\nsource_profile = base\nregion = us-east-1\n"
        );
        std::fs::write(&file, text).expect("writable");
    };
    write("first");
    let variables = [
        ("AWS_ENDPOINT_URL", place.door.endpoint()),
        ("AWS_ENDPOINT_URL_STS", service),
        ("AWS_PROFILE", "role".to_owned()),
    ];
    let variables = variables.map(|(name, value)| (name.to_owned(), value));
    let (home, folder, url) =
        (place.scratch.join("home"), place.scratch.join("mnt"), place.bucket.url().to_string());
    let mut mount = Mount::new(&home, &url, &folder, &["--read-only"], &variables);
    assert_eq!(place.door.keys()[0], "of-first");
    write("second");
    let started = Instant::now();
    for number in 0..200 {
        std::fs::read(folder.join(format!("{number:03}"))).expect("a file that was not read before");
        if place.door.keys().iter().any(|key| key == "of-second") {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let keys = place.door.keys();
    assert!(keys.iter().any(|key| key == "of-second") && started.elapsed() < DEADLINE, "{keys:?}");
    mount.unmount();
}
