//! Several mounts that write to one volume: the one that holds it serves its tree, the others join.
//!
//! Who holds the volume is decided by its lease alone; the record of that tells where its tree is served. Whoever knows the secret
//! may join. Each mount reads and writes objects by itself.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{Error, ErrorKind, Result, VolumeId};
use forebay_io::net::secure::{Host, Identity, Listen, Transport, endpoint, read_secret};
use forebay_io::object::Bucket;
use forebay_io::rng::Rng;
use forebay_io::task::TaskGroup;
use forebay_metadata::remote::{Finder, Guest, PROTOCOL, Reached, RemoteParts, RemoteTree, Server};
use forebay_metadata::tree::LocalTree;
use forebay_metadata::volume_file::{EngineKind, VolumeFile, VolumeRecord};
use futures::future::FutureExt;
use serde::{Deserialize, Serialize};

/// The port that a tree is served at where none is named.
const PORT: u16 = 7401;

/// How several mounts write to one volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JoinSettings {
    /// A file with what all hosts that write to the volume know and nobody else does; 16 bytes or more. White space around it
    /// does not count. Default none: one mount alone writes, and others are refused.
    pub secret: Option<PathBuf>,
    /// Where this host serves the tree while it holds the volume: an address, a port behind `:`, or both. Default port 7401 of all
    /// addresses.
    pub listen: Option<String>,
    /// Where others reach it, `host` or `host:port`. Default the address of `listen`, else the one that this host speaks to others
    /// from.
    pub address: Option<String>,
    /// Whether this mount never holds the volume, and waits for somebody who does. Default false.
    pub only: bool,
    /// Milliseconds for which a mount that joined waits for who serves the tree, or takes it over, before a call fails. Default
    /// 60,000: a lease runs out in 15 s, and a process is started again in less than the rest.
    pub deadline_ms: u64,
}

impl Default for JoinSettings {
    fn default() -> Self {
        Self { secret: None, listen: None, address: None, only: false, deadline_ms: 60_000 }
    }
}

impl JoinSettings {
    /// Whether other mounts may write as well.
    pub fn is_on(&self) -> bool {
        self.secret.is_some()
    }

    /// Refuses settings that cannot work.
    ///
    /// # Errors
    /// `Invalid`, with what to set.
    pub(crate) fn validate(&self) -> Result<()> {
        if !self.is_on() {
            return match self.listen.is_some() || self.address.is_some() || self.only {
                true => Err(Error::invalid(
                    "a volume is written to by those who know a secret, and none is given",
                )
                .with_hint("give each host the same file: `join_secret`, or `secret` of [volume.join]")),
                false => Ok(()),
            };
        }
        if self.deadline_ms == 0 {
            return Err(Error::invalid("a tree that may take no time is never asked")
                .with_hint("set `deadline_ms` of [volume.join] to 1 or more"));
        }
        self.listen()?;
        self.advertised().map(drop)
    }

    pub(crate) fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms)
    }

    fn listen(&self) -> Result<Listen> {
        let listen = Listen::parse(self.listen.as_deref(), PORT)?;
        match listen.port {
            0 => {
                Err(Error::invalid("a tree cannot be served at port 0")
                    .with_hint("name a port, such as :7401"))
            }
            _ => Ok(listen),
        }
    }

    /// What the volume's record says of where the tree is served.
    pub(crate) fn advertised(&self) -> Result<String> {
        let listen = self.listen()?;
        if let Some(address) = &self.address {
            let (name, port) = endpoint(address, listen.port)?;
            return Ok(spelled(name, port));
        }
        let ip = listen.ip.filter(|ip| !ip.is_unspecified()).unwrap_or_else(own_address);
        Ok(SocketAddr::new(ip, listen.port).to_string())
    }

    async fn identity(&self, volume: VolumeId) -> Result<Identity> {
        let secret = read_secret(self.secret.as_deref().unwrap_or("".as_ref())).await?;
        Identity::new(&secret, &volume.0.to_le_bytes(), PROTOCOL)
    }

    /// Opens the port at which a tree is to be served.
    ///
    /// # Errors
    /// `Exists` where another process has the port; `Invalid` for a secret that is none.
    pub(crate) async fn listen_for(&self, volume: VolumeId) -> Result<Host> {
        Host::open(Transport::Tcp, self.listen()?, &self.identity(volume).await?)
    }

    /// Serves a tree there until that is stopped.
    pub(crate) fn serve(&self, host: Host, tree: Arc<LocalTree>, tasks: &TaskGroup) -> Result<Server> {
        tracing::info!(address = self.advertised()?, "other mounts may join and write to this volume, too");
        Ok(Server::start(tree, host, Rng::system().u64(), Server::PATIENCE, tasks))
    }

    /// Joins the mount that holds the volume of `record`, whoever that is from now on, if it is reached within `first`.
    ///
    /// # Errors
    /// `Unavailable` where it is not; `Denied` where it knows another secret.
    pub(crate) async fn join(
        &self,
        bucket: &Bucket,
        record: &VolumeRecord,
        first: Duration,
    ) -> Result<RemoteTree> {
        // Nobody comes to this port: a host has to have one to go from.
        let nobody = Listen { ip: Some(Ipv4Addr::LOCALHOST.into()), port: 0 };
        let host = Host::open(Transport::Tcp, nobody, &self.identity(record.volume).await?)?;
        let name = format!("{}-{}", forebay_io::host::name().await, std::process::id());
        RemoteTree::open(RemoteParts {
            volume: record.volume,
            host,
            find: finder(bucket, record.engine),
            name,
            first,
            deadline: self.deadline(),
            rng: Rng::system(),
        })
        .await
    }
}

/// Looks in the volume's record for where its tree is served.
fn finder(bucket: &Bucket, engine: EngineKind) -> Finder {
    let bucket = bucket.apart();
    Arc::new(move || {
        let bucket = bucket.clone();
        async move {
            let record = VolumeFile::of(&bucket, engine).look().await?;
            let Some(lease) = record.and_then(|record| record.lease) else {
                return Err(Error::new(ErrorKind::Unavailable, "nobody holds the volume now"));
            };
            let Some(address) = lease.address else {
                let fact = format!("{} holds the volume and serves its tree to nobody", lease.holder);
                return Err(Error::new(ErrorKind::Unavailable, fact).with_hint(ALONE));
            };
            let found = tokio::net::lookup_host(&address).await;
            let found = found.map_err(|error| Error::from(error).context(format!("look {address} up")))?;
            Ok(found.collect())
        }
        .boxed()
    })
}

/// What to do about a mount that has the volume for itself.
pub(crate) const ALONE: &str = "mount it there with --join-secret, too";

fn spelled(name: &str, port: u16) -> String {
    match name.parse::<IpAddr>() {
        Ok(ip) => SocketAddr::new(ip, port).to_string(),
        Err(_) => format!("{name}:{port}"),
    }
}

/// The address that this host speaks to others from; itself where it speaks to none.
fn own_address() -> IpAddr {
    let ask = |from: &str, to: &str| {
        let socket = UdpSocket::bind(from).ok()?;
        // Sends nothing: the kernel chooses the way. These addresses are for documentation (RFC 5737, RFC 3849).
        socket.connect(to).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    let found = ask("0.0.0.0:0", "192.0.2.1:9").or_else(|| ask("[::]:0", "[2001:db8::1]:9"));
    found.unwrap_or(Ipv4Addr::LOCALHOST.into())
}

/// How a mount shares its volume with others that write.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Sharing {
    /// It holds the volume and serves its tree.
    Serves {
        /// The mounts that joined, by host and process.
        mounts: Vec<Joined>,
    },
    /// It joined.
    Joins {
        /// Where the tree is served; nothing while that is being looked for.
        server: Option<String>,
        /// How often it was found again.
        reconnects: u64,
        /// What was asked of the tree so far.
        requests: u64,
    },
}

/// A mount that joined.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Joined {
    /// Its host and process.
    pub name: String,
    /// Whether it is connected, or lost and waited for.
    pub is_here: bool,
}

impl Sharing {
    pub(crate) fn of_server(server: &Server) -> Self {
        let joined = |Guest { name, is_here }| Joined { name, is_here };
        Self::Serves { mounts: server.guests().into_iter().map(joined).collect() }
    }

    pub(crate) fn of_guest(tree: &RemoteTree) -> Self {
        let reached = tree.reached();
        let times = |Reached { times, .. }| times;
        Self::Joins {
            server: reached.map(|reached| reached.address.to_string()),
            reconnects: reached.map_or(0, times),
            requests: tree.requests(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_cannot_work_are_refused() {
        let on = JoinSettings { secret: Some("/s".into()), ..JoinSettings::default() };
        on.validate().expect("whole");
        JoinSettings::default().validate().expect("none");
        for (wrong, says) in [
            (JoinSettings { only: true, ..JoinSettings::default() }, "secret"),
            (JoinSettings { listen: Some(":9".into()), ..JoinSettings::default() }, "secret"),
            (JoinSettings { listen: Some(":0".into()), ..on.clone() }, "port 0"),
            (JoinSettings { listen: Some("host:7".into()), ..on.clone() }, "`host`"),
            (JoinSettings { address: Some("a:b".into()), ..on.clone() }, "`a:b`"),
            (JoinSettings { deadline_ms: 0, ..on.clone() }, "no time"),
        ] {
            let error = wrong.validate().expect_err(says);
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    #[test]
    fn others_are_told_where_the_tree_is() {
        let told = |listen: Option<&str>, address: Option<&str>| {
            let (listen, address) = (listen.map(str::to_owned), address.map(str::to_owned));
            let settings =
                JoinSettings { listen, address, secret: Some("/s".into()), ..JoinSettings::default() };
            settings.advertised().expect("whole")
        };
        assert_eq!(told(Some("10.0.0.5:81"), None), "10.0.0.5:81");
        assert_eq!(told(Some("10.0.0.5:81"), Some("pod.svc")), "pod.svc:81");
        assert_eq!(told(None, Some("[2001:db8::5]:9")), "[2001:db8::5]:9");
        assert_eq!(told(Some(":82"), None), SocketAddr::new(own_address(), 82).to_string());
    }
}
