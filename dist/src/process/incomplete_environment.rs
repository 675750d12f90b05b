//! Errors for platforms that number the processes of a job, but do not state everything that ranks need to connect.
//!
//! Without these errors each process would be taken for a single process, and every machine of the job would train its own model.

use super::environment::EnvVars;
use crate::error::{Error, Kind, Result};

/// The variables that state a rank completely.
const COMPLETE: [&str; 3] = ["RANK", "WORLD_SIZE", "MASTER_ADDR"];

/// The part of a process's description that its platform states.
struct Stated {
    /// What the environment states, as the start of a sentence.
    what: String,
    rank: Option<usize>,
    /// The machines of the job by rank; empty if they are not stated.
    hosts: Vec<String>,
}

/// Returns an error for an environment that shows one process of several without their count and the address of rank 0. The caller
/// checks only if `WORLD_SIZE` is unset: `WORLD_SIZE=1` states that the process is alone.
///
/// # Errors
/// `Kind::Config` naming the variables that are missing, with their values where the environment states them.
pub(super) fn refuse(variables: &EnvVars<'_>) -> Result<()> {
    let platforms = [sagemaker, cloud_tpu, indexed_job, node_rank];
    platforms
        .into_iter()
        .find_map(|read| read(variables))
        .map_or(Ok(()), |stated| Err(stated.error(variables)))
}

impl Stated {
    fn error(&self, variables: &EnvVars<'_>) -> Error {
        let missing: Vec<&str> = COMPLETE.into_iter().filter(|name| !variables.is_set(name)).collect();
        let verb = if missing.len() > 1 { "are" } else { "is" };
        let why = format!("{}, but {} {verb} not set", self.what, listed(&missing));
        let set: Vec<String> = missing.iter().map(|name| self.setting(name)).collect();
        let help = format!("set {}", listed(&set.iter().map(String::as_str).collect::<Vec<_>>()));
        Error::new(Kind::Config, why)
            .detail("help", help)
            .detail("help", "set WORLD_SIZE=1 if this process runs alone")
    }

    /// Returns a variable with its value for this process, or with a description where the value is unknown.
    fn setting(&self, name: &str) -> String {
        let value = match name {
            "RANK" => self.rank.map(|rank| rank.to_string()),
            "WORLD_SIZE" => Some(self.hosts.len().to_string()).filter(|_| !self.hosts.is_empty()),
            _ => self.hosts.first().cloned(),
        };
        let description = match name {
            "RANK" => "to the number of this process, from 0",
            "WORLD_SIZE" => "to the number of processes",
            _ => "to a name or an address of the machine of rank 0",
        };
        value.map_or_else(|| format!("{name} {description}"), |value| format!("{name}={value}"))
    }
}

/// Joins names as a sentence lists them.
fn listed(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [one] => (*one).to_string(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

/// Splits a list of hosts: `a,b`, or the JSON list `["a","b"]`.
fn hosts(list: &str) -> Vec<String> {
    let inside = list.trim_start_matches('[').trim_end_matches(']');
    let names = inside.split(',').map(|name| name.trim().trim_matches('"').to_string());
    names.filter(|name| !name.is_empty()).collect()
}

/// Amazon SageMaker: `SM_HOSTS` is a JSON list of host names, `SM_CURRENT_HOST` one of them. One host is alone.
fn sagemaker(variables: &EnvVars<'_>) -> Option<Stated> {
    let current = variables.get("SM_CURRENT_HOST");
    let Some(list) = variables.get("SM_HOSTS") else {
        let what = format!("SM_CURRENT_HOST is {}, and SM_HOSTS does not name the hosts", current?);
        return Some(Stated { what, rank: None, hosts: Vec::new() });
    };
    let hosts = hosts(&list);
    let rank = hosts.iter().position(|host| Some(host) == current.as_ref());
    let what = format!("SM_HOSTS names {} hosts", hosts.len());
    (hosts.len() > 1).then_some(Stated { what, rank, hosts })
}

/// Cloud TPU: `TPU_WORKER_HOSTNAMES` is a list in the order of `TPU_WORKER_ID`. One host is alone.
fn cloud_tpu(variables: &EnvVars<'_>) -> Option<Stated> {
    let id = variables.get("TPU_WORKER_ID");
    let rank = id.as_ref().and_then(|id| id.parse().ok());
    let Some(list) = variables.get("TPU_WORKER_HOSTNAMES") else {
        let what = format!("TPU_WORKER_ID is {}, and TPU_WORKER_HOSTNAMES does not name the workers", id?);
        return Some(Stated { what, rank, hosts: Vec::new() });
    };
    let hosts = hosts(&list);
    let what = format!("TPU_WORKER_HOSTNAMES names {} workers", hosts.len());
    (hosts.len() > 1).then_some(Stated { what, rank, hosts })
}

/// An indexed Job of Kubernetes: `JOB_COMPLETION_INDEX` is the number of the pod. How many pods there are is not stated, not even
/// that there is one.
fn indexed_job(variables: &EnvVars<'_>) -> Option<Stated> {
    let index = variables.get("JOB_COMPLETION_INDEX")?;
    let what = format!("JOB_COMPLETION_INDEX is {index}: this is a pod of an indexed Job");
    Some(Stated { what, rank: index.parse().ok(), hosts: Vec::new() })
}

/// `NODE_RANK`, which several platforms set to the number of a machine.
fn node_rank(variables: &EnvVars<'_>) -> Option<Stated> {
    let node = variables.get("NODE_RANK")?;
    // The number of a process only if each machine runs one.
    let what = format!("NODE_RANK is {node}: this is one of several machines");
    Some(Stated { what, rank: None, hosts: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of the error, if there is one.
    fn refusal(set: &[(&str, &str)]) -> Option<String> {
        let get = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        refuse(&EnvVars(&get)).err().map(|error| {
            assert_eq!(error.kind(), Kind::Config);
            error.to_string()
        })
    }

    #[test]
    fn error_names_the_missing_variables() {
        let all = "RANK, WORLD_SIZE and MASTER_ADDR are not set";
        for (set, why) in [
            (
                &[("JOB_COMPLETION_INDEX", "2")][..],
                format!("JOB_COMPLETION_INDEX is 2: this is a pod of an indexed Job, but {all}"),
            ),
            (&[("NODE_RANK", "0")], format!("NODE_RANK is 0: this is one of several machines, but {all}")),
            (&[("NODE_RANK", "1"), ("MASTER_ADDR", "a")], "but RANK and WORLD_SIZE are not set".to_string()),
            (
                &[("NODE_RANK", "1"), ("RANK", "1"), ("MASTER_ADDR", "a")],
                "but WORLD_SIZE is not set".to_string(),
            ),
            (
                &[("TPU_WORKER_ID", "0"), ("TPU_WORKER_HOSTNAMES", "t0,t1")],
                format!("TPU_WORKER_HOSTNAMES names 2 workers, but {all}"),
            ),
            (&[("TPU_WORKER_ID", "0")], format!("TPU_WORKER_HOSTNAMES does not name the workers, but {all}")),
            (
                &[("SM_HOSTS", r#"["algo-1","algo-2"]"#), ("SM_CURRENT_HOST", "algo-2")],
                format!("SM_HOSTS names 2 hosts, but {all}"),
            ),
            (&[("SM_CURRENT_HOST", "algo-1")], format!("SM_HOSTS does not name the hosts, but {all}")),
        ] {
            let text = refusal(set).unwrap_or_else(|| panic!("{set:?} gives no error"));
            assert!(text.contains(&why), "{text}");
            assert!(text.contains("WORLD_SIZE=1"), "{text}");
        }
    }

    #[test]
    fn help_has_the_values_that_are_stated() {
        for (set, help) in [
            (
                &[("SM_HOSTS", r#"["algo-1", "algo-2"]"#), ("SM_CURRENT_HOST", "algo-2")][..],
                "set RANK=1, WORLD_SIZE=2 and MASTER_ADDR=algo-1",
            ),
            (
                &[("TPU_WORKER_ID", "1"), ("TPU_WORKER_HOSTNAMES", "t0,t1,t2"), ("RANK", "1")],
                "set WORLD_SIZE=3 and MASTER_ADDR=t0",
            ),
            (
                &[("JOB_COMPLETION_INDEX", "4")],
                "set RANK=4, WORLD_SIZE to the number of processes and MASTER_ADDR to a name",
            ),
        ] {
            let text = refusal(set).unwrap_or_default();
            assert!(text.contains(help), "{text}");
        }
    }

    #[test]
    fn one_host_is_no_error() {
        for set in [
            &[][..],
            &[("SM_HOSTS", r#"["algo-1"]"#), ("SM_CURRENT_HOST", "algo-1")],
            &[("TPU_WORKER_ID", "0"), ("TPU_WORKER_HOSTNAMES", "localhost")],
            &[("JOB_COMPLETION_INDEX", "")],
        ] {
            assert_eq!(refusal(set), None, "{set:?}");
        }
    }
}
