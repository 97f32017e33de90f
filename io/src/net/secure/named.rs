//! How people name hosts, ports and secrets.

use std::net::IpAddr;
use std::path::Path;

use forebay_core::{Error, Result};

use super::Listen;

/// A file longer than this holds no secret.
const LONGEST_SECRET: u64 = 64 << 10;

/// What a secret's file holds, without white space around it.
///
/// # Errors
/// What the file system says, naming the file.
pub async fn read_secret(path: &Path) -> Result<Vec<u8>> {
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
            let error =
                Error::from(error).context(format!("the secret that hosts share, {}", path.display()));
            Err(error.with_hint("head -c 32 /dev/urandom | base64 makes one; all hosts take the same"))
        }
    }
}

/// A host's name or address, without the brackets of an IPv6 one, and its port, `port` where none is named.
///
/// # Errors
/// `Invalid` for what names none.
pub fn endpoint(text: &str, port: u16) -> Result<(&str, u16)> {
    let wrong = || {
        Error::invalid(format!("`{text}` names no host and port"))
            .with_hint(format!("host, host:{port}, 10.0.0.5:{port}, or [2001:db8::5]:{port}"))
    };
    let (name, named) = match text.strip_prefix('[') {
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
    let port = named.map_or(Ok(port), |port| port.parse().map_err(|_| wrong()))?;
    match name.contains(char::is_whitespace) || text.is_empty() {
        true => Err(wrong()),
        false => Ok((name, port)),
    }
}

impl Listen {
    /// An address, a port behind `:`, or both; `port` of all addresses where nothing is said.
    ///
    /// # Errors
    /// `Invalid` for what is no address.
    pub fn parse(text: Option<&str>, port: u16) -> Result<Self> {
        let Some(text) = text else { return Ok(Self { ip: None, port }) };
        let (name, port) = endpoint(text, port)?;
        let ip = match name {
            "" => None,
            name => Some(name.parse::<IpAddr>().map_err(|_| {
                Error::invalid(format!("`{name}` is no address to listen at"))
                    .with_hint(format!("10.0.0.5:{port}, [2001:db8::5]:{port}, or :{port} for all addresses"))
            })?),
        };
        Ok(Self { ip, port })
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
            assert_eq!(endpoint(text, 7400).ok(), expected, "{text}");
        }
    }
}
