//! A background thread for slow output: lines for a paused reader, files on a stalled disk.

use shardgrad::{Error, Result};
use std::sync::mpsc::{SendError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

type Task = Box<dyn FnOnce() -> Result<()> + Send>;

/// A thread that runs submitted tasks in order. Dropping the worker waits for all tasks. If no thread can be started, tasks run
/// immediately.
#[derive(Debug)]
pub(crate) struct BackgroundWorker {
    queue: Option<Sender<Task>>,
    thread: Option<JoinHandle<()>>,
    failed: FirstError,
}

/// The first error that has not been taken yet.
#[derive(Clone, Debug, Default)]
struct FirstError(Arc<Mutex<Option<Error>>>);

impl FirstError {
    fn of(&self, task: Task) {
        if let Err(e) = task() {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
        }
    }

    fn take(&self) -> Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }
}

impl BackgroundWorker {
    /// Starts the thread.
    pub(crate) fn start() -> BackgroundWorker {
        let (queue, tasks) = channel::<Task>();
        let failed = FirstError::default();
        let here = failed.clone();
        let thread = Builder::new().spawn(move || tasks.into_iter().for_each(|task| here.of(task))).ok();
        BackgroundWorker { queue: Some(queue), thread, failed }
    }

    /// Submits a task.
    pub(crate) fn submit(&self, task: impl FnOnce() -> Result<()> + Send + 'static) {
        let sent = self.queue.as_ref().map(|queue| Sender::send(queue, Box::new(task)));
        if let Some(Err(SendError(task))) = sent {
            self.failed.of(task);
        }
    }

    /// Returns and clears the first error of the tasks so far.
    ///
    /// # Errors
    /// The first error since the last call.
    pub(crate) fn take_error(&self) -> Result<()> {
        self.failed.take()
    }

    /// Waits for all submitted tasks.
    ///
    /// # Errors
    /// As [`BackgroundWorker::take_error`].
    pub(crate) fn wait(&self) -> Result<()> {
        self.drain();
        self.take_error()
    }

    /// Waits for all submitted tasks and leaves errors to a later call.
    pub(crate) fn drain(&self) {
        let (done, all) = channel();
        self.submit(move || {
            let _ = Sender::send(&done, ());
            Ok(())
        });
        // A closed channel means that the thread is gone, and the task with it.
        let _ = all.iter().next();
    }
}

impl Drop for BackgroundWorker {
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
    fn slow_tasks_run_in_order_in_the_background_and_finish_on_drop() {
        let (done, seen) = channel();
        let (go, gone) = channel::<()>();
        let worker = BackgroundWorker::start();
        // The first task blocks the worker until all tasks are submitted.
        worker.submit(move || {
            let _ = gone.recv();
            Ok(())
        });
        for i in 0..5 {
            let done = done.clone();
            worker.submit(move || {
                done.send(i).unwrap();
                if i % 2 == 1 { Err(Error::new(Kind::Io, format!("number {i}"))) } else { Ok(()) }
            });
        }
        assert!(seen.try_recv().is_err());
        go.send(()).unwrap();
        assert_eq!(worker.wait().unwrap_err().message(), "number 1");
        worker.take_error().unwrap();
        assert!(seen.try_iter().eq(0..5));
        let (go, gone) = channel::<()>();
        worker.submit(move || {
            let _ = gone.recv();
            done.send(5).unwrap();
            Ok(())
        });
        assert!(seen.try_recv().is_err());
        drop(go);
        drop(worker);
        assert!(seen.try_iter().eq([5]));
    }
}
