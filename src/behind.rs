//! What may take long and nobody should wait for: lines for a reader that pauses, files on a disk that stalls.

use shardgrad::{Error, Result};
use std::sync::mpsc::{SendError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

type Deed = Box<dyn FnOnce() -> Result<()> + Send>;

/// A thread that does what it is handed, in that order; all is done when this is dropped. Where there is no thread to be had,
/// things are done at once.
#[derive(Debug)]
pub(crate) struct Behind {
    queue: Option<Sender<Deed>>,
    thread: Option<JoinHandle<()>>,
    failed: Failed,
}

/// The first error that nobody has been told of.
#[derive(Clone, Debug, Default)]
struct Failed(Arc<Mutex<Option<Error>>>);

impl Failed {
    fn of(&self, deed: Deed) {
        if let Err(e) = deed() {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
        }
    }

    fn take(&self) -> Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }
}

impl Behind {
    /// Starts the thread.
    pub(crate) fn start() -> Behind {
        let (queue, deeds) = channel::<Deed>();
        let failed = Failed::default();
        let here = failed.clone();
        let thread = Builder::new().spawn(move || deeds.into_iter().for_each(|deed| here.of(deed))).ok();
        Behind { queue: Some(queue), thread, failed }
    }

    /// Hands over something to be done.
    pub(crate) fn hand(&self, deed: impl FnOnce() -> Result<()> + Send + 'static) {
        let sent = self.queue.as_ref().map(|queue| Sender::send(queue, Box::new(deed)));
        if let Some(Err(SendError(deed))) = sent {
            self.failed.of(deed);
        }
    }

    /// What went wrong so far, once.
    ///
    /// # Errors
    /// The first error of what was done.
    pub(crate) fn told(&self) -> Result<()> {
        self.failed.take()
    }

    /// Waits until everything is done.
    ///
    /// # Errors
    /// As [`Behind::told`].
    pub(crate) fn wait(&self) -> Result<()> {
        self.settle();
        self.told()
    }

    /// Waits until everything is done; what went wrong is still to be told.
    pub(crate) fn settle(&self) {
        let (done, all) = channel();
        self.hand(move || {
            let _ = Sender::send(&done, ());
            Ok(())
        });
        // What is not heard of will never be done: the thread has gone, and what it left with it.
        let _ = all.iter().next();
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        drop(self.queue.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad::Kind;

    #[test]
    fn what_is_slow_holds_nobody_up_and_is_done_in_order_and_to_the_end() {
        let (done, seen) = channel();
        let (go, gone) = channel::<()>();
        let behind = Behind::start();
        // Nothing is done before this thread, which has handed over all of it by then, lets it.
        behind.hand(move || {
            let _ = gone.recv();
            Ok(())
        });
        for i in 0..5 {
            let done = done.clone();
            behind.hand(move || {
                done.send(i).unwrap();
                if i % 2 == 1 { Err(Error::new(Kind::Io, format!("number {i}"))) } else { Ok(()) }
            });
        }
        assert!(seen.try_recv().is_err());
        go.send(()).unwrap();
        assert_eq!(behind.wait().unwrap_err().message(), "number 1");
        behind.told().unwrap();
        assert!(seen.try_iter().eq(0..5));
        let (go, gone) = channel::<()>();
        behind.hand(move || {
            let _ = gone.recv();
            done.send(5).unwrap();
            Ok(())
        });
        assert!(seen.try_recv().is_err());
        drop(go);
        drop(behind);
        assert!(seen.try_iter().eq([5]));
    }
}
