//! A cable between two processes, which a test can cut and mend.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Passes on whatever comes over TCP. Threads of it end with the streams that they serve, and the last one with the process.
#[derive(Debug)]
pub struct Cable {
    address: SocketAddr,
    ends: Arc<Mutex<Ends>>,
}

#[derive(Debug, Default)]
struct Ends {
    is_cut: bool,
    streams: Vec<TcpStream>,
}

impl Cable {
    /// One to whoever listens at `far` when somebody comes.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn new(far: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let (address, ends) = (listener.local_addr()?, Arc::new(Mutex::new(Ends::default())));
        let shared = ends.clone();
        thread::spawn(move || {
            for near in listener.incoming() {
                // Who is not there is not reached: its stream ends.
                let _ = near.and_then(|near| connect(near, far, &shared));
            }
        });
        Ok(Self { address, ends })
    }

    /// Where it begins.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends all streams, as the kernel does for a process that dies, and lets none through from now on.
    pub fn cut(&self) {
        let mut ends = lock(&self.ends);
        ends.is_cut = true;
        for stream in ends.streams.drain(..) {
            // It may have ended by itself.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Lets new streams through.
    pub fn mend(&self) {
        lock(&self.ends).is_cut = false;
    }
}

fn lock(ends: &Mutex<Ends>) -> std::sync::MutexGuard<'_, Ends> {
    ends.lock().unwrap_or_else(PoisonError::into_inner)
}

fn connect(near: TcpStream, far: SocketAddr, ends: &Mutex<Ends>) -> io::Result<()> {
    let mut ends = lock(ends);
    if ends.is_cut {
        return Ok(());
    }
    let far = TcpStream::connect(far)?;
    for (from, to) in [(&near, &far), (&far, &near)] {
        from.set_nodelay(true)?;
        let (mut from, mut to) = (from.try_clone()?, to.try_clone()?);
        ends.streams.push(from.try_clone()?);
        thread::spawn(move || {
            let _ = io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
        });
    }
    Ok(())
}
