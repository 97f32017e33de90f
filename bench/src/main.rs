//! The benchmark's commands: `run` the scenarios, or be the `store` they run against.
#![allow(clippy::print_stdout, reason = "the store's address is its output")]

use std::time::Duration;

use anyhow::Result;
use clap::{Args, Parser};
use forebay_bench::store::{PaceSettings, ServerSettings, serve};

/// Measures Forebay against the limits it aims at.
#[derive(Parser)]
enum Command {
    /// Serve an S3 store in memory until stdin closes; prints its address.
    Store(Store),
}

#[derive(Args)]
struct Store {
    /// A bucket that is there from the start.
    #[arg(long)]
    bucket: Vec<String>,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: String,
    /// Milliseconds before each answer.
    #[arg(long, default_value_t = 0)]
    delay_ms: u64,
    /// Bytes a second over all connections.
    #[arg(long)]
    rate: Option<u64>,
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Store(store) => serve_store(store),
    }
}

fn serve_store(store: Store) -> Result<()> {
    let pace = PaceSettings { delay: Duration::from_millis(store.delay_ms), rate: store.rate };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(&store.listen).await?;
        println!("{}", listener.local_addr()?);
        let closed =
            tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink()));
        tokio::select! {
            ended = serve(listener, ServerSettings { buckets: store.bucket, pace }) => ended,
            _ = closed => Ok(()),
        }
    })
}
