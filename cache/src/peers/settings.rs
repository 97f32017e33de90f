//! What can be set about sharing blocks with other hosts.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_core::{Error, Result};
use forebay_io::net::secure::{Listen, Transport};
use serde::{Deserialize, Serialize};

/// How often who works on an answer says so.
pub(super) const BEAT: Duration = Duration::from_secs(1);

/// The port that hosts listen at, and are looked for at, where none is named.
const PORT: u16 = 7400;
/// A file longer than this holds no secret.
const LONGEST_SECRET: u64 = 64 << 10;

/// How hosts that mount one volume share the blocks that they have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PeerSettings {
    /// Names or addresses of all hosts, this one among them or not, with `:PORT` where it is another than 7400. A name
    /// stands for all addresses that it has, and is looked up every ten seconds. Default none: nothing is shared.
    pub members: Vec<String>,
    /// A file with what all of them know and nobody else does; 16 bytes or more. White space around it does not count.
    pub secret: Option<PathBuf>,
    /// Where this host listens: an address, a port behind `:`, or both. Default port 7400 of all addresses.
    pub listen: Option<String>,
    /// What carries blocks: `tcp` or `quic`. Default `tcp`.
    pub transport: Transport,
    /// Whether what came from another host is kept on this one's disk, too. Default false: each host's disk holds its own
    /// share, so that together they hold as much as all their disks.
    pub keep: bool,
    /// Milliseconds until the store is asked for a block that its owner works on; an owner that says nothing for three tenths of
    /// it, where it should say each second that it works, is away. Default 10,000: ten times what a store that is well takes.
    pub deadline_ms: u64,
}

impl Default for PeerSettings {
    fn default() -> Self {
        Self {
            members: Vec::new(),
            secret: None,
            listen: None,
            transport: Transport::Tcp,
            keep: false,
            deadline_ms: 10_000,
        }
    }
}

impl PeerSettings {
    /// How long a host may say nothing, whatever it works on, until it counts as away: three tenths of the deadline, and more than
    /// what passes from one word to the next.
    pub(super) fn silence(&self) -> Duration {
        Duration::from_millis(self.deadline_ms.saturating_mul(3) / 10).max(2 * BEAT)
    }

    /// How long the store waits to be asked for what an owner works on.
    pub(super) fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms)
    }

    /// Whether blocks are shared.
    pub fn is_on(&self) -> bool {
        !self.members.is_empty()
    }

    /// Refuses settings that cannot work.
    ///
    /// # Errors
    /// `Invalid`, with what to set.
    pub fn validate(&self) -> Result<()> {
        if !self.is_on() {
            return match self.secret.is_some() || self.listen.is_some() {
                true => Err(Error::invalid("other hosts are set up, and none is named")
                    .with_hint("name them: `peers`, or `members` of [volume.cache.peers]")),
                false => Ok(()),
            };
        }
        if self.secret.is_none() {
            return Err(Error::invalid("blocks are shared among those who know a secret, and none is given")
                .with_hint(
                    "give each host the same file: `peer_secret`, or `secret` of [volume.cache.peers]",
                ));
        }
        if self.deadline_ms == 0 {
            return Err(Error::invalid("other hosts that may take no time are never asked")
                .with_hint("set `deadline_ms` to 1 or more, or name no hosts"));
        }
        self.listen()?;
        self.members.iter().try_for_each(|member| endpoint(member).map(drop))
    }

    /// What the secret's file holds.
    ///
    /// # Errors
    /// What the file system says, naming the file.
    pub(super) async fn read_secret(&self) -> Result<Vec<u8>> {
        let path: &Path = self.secret.as_deref().unwrap_or(Path::new(""));
        let read = async {
            let length = tokio::fs::metadata(path).await?.len();
            match length > LONGEST_SECRET {
                true => Err(std::io::Error::other(format!("{length} bytes are no secret"))),
                false => tokio::fs::read(path).await,
            }
        };
        match read.await {
            Ok(bytes) => Ok(bytes.trim_ascii().to_vec()),
            Err(error) => {
                let error = Error::from(error).context(format!("the secret of peers, {}", path.display()));
                Err(error.with_hint("head -c 32 /dev/urandom | base64 makes one; all hosts take the same"))
            }
        }
    }

    /// Where this host listens.
    pub(super) fn listen(&self) -> Result<Listen> {
        let Some(text) = &self.listen else { return Ok(Listen { ip: None, port: PORT }) };
        let (name, port) = endpoint(text)?;
        let ip = match name {
            "" => None,
            name => Some(name.parse::<IpAddr>().map_err(|_| {
                Error::invalid(format!("`{name}` is no address to listen at"))
                    .with_hint("10.0.0.5:7400, [2001:db8::5]:7400, or :7400 for all addresses")
            })?),
        };
        Ok(Listen { ip, port })
    }
}

/// A host's name or address, without the brackets of an IPv6 one, and its port.
pub(super) fn endpoint(text: &str) -> Result<(&str, u16)> {
    let wrong = || {
        Error::invalid(format!("`{text}` names no host and port"))
            .with_hint("host, host:7400, 10.0.0.5:7400, or [2001:db8::5]:7400")
    };
    let (name, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (ip, behind) = rest.split_once(']').ok_or_else(wrong)?;
            (ip, if behind.is_empty() { None } else { Some(behind.strip_prefix(':').ok_or_else(wrong)?) })
        }
        // More than one colon: an address of IPv6 alone.
        None if text.matches(':').count() > 1 => (text, None),
        None => match text.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (text, None),
        },
    };
    let port = port.map_or(Ok(PORT), |port| port.parse().map_err(|_| wrong()))?;
    match name.contains(char::is_whitespace) || text.is_empty() {
        true => Err(wrong()),
        false => Ok((name, port)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_named_in_the_ways_that_people_do() {
        for (text, expected) in [
            ("cache", Some(("cache", 7400))),
            ("cache.training.svc:99", Some(("cache.training.svc", 99))),
            ("10.0.0.5:1", Some(("10.0.0.5", 1))),
            ("[2001:db8::5]:7401", Some(("2001:db8::5", 7401))),
            ("[2001:db8::5]", Some(("2001:db8::5", 7400))),
            ("2001:db8::5", Some(("2001:db8::5", 7400))),
            (":80", Some(("", 80))),
            ("", None),
            ("a b", None),
            ("a:b", None),
            ("a:70000", None),
            ("[::1", None),
            ("[::1]80", None),
        ] {
            assert_eq!(endpoint(text).ok(), expected, "{text}");
        }
    }

    #[test]
    fn settings_that_cannot_work_are_refused() {
        let named =
            PeerSettings { members: vec!["a".into()], secret: Some("/s".into()), ..PeerSettings::default() };
        named.validate().expect("whole");
        PeerSettings::default().validate().expect("none");
        for (wrong, says) in [
            (PeerSettings { secret: None, ..named.clone() }, "secret"),
            (PeerSettings { members: vec![], ..named.clone() }, "none is named"),
            (PeerSettings { members: vec!["a:b".into()], ..named.clone() }, "`a:b`"),
            (PeerSettings { listen: Some("host:7".into()), ..named.clone() }, "`host`"),
            (PeerSettings { deadline_ms: 0, ..named.clone() }, "no time"),
        ] {
            let error = wrong.validate().expect_err(says);
            assert!(error.to_string().contains(says), "{error}");
        }
        let listen =
            |text: &str| PeerSettings { listen: Some(text.into()), ..named.clone() }.listen().expect(text);
        assert_eq!(listen(":81"), Listen { ip: None, port: 81 });
        assert_eq!(listen("127.0.0.1:0").to_string(), "127.0.0.1:0");
    }
}
