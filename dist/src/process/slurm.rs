//! SLURM's variables: node lists, tasks per node, and the port and run id of a job step.

use super::environment::EnvVars;
use crate::error::Result;

/// The range of ports for jobs of SLURM, chosen by job and step id.
const FIRST_PORT: u16 = 20_000;
const NUM_PORTS: u64 = 10_000;
/// The distance between the ports of consecutive jobs. It shares no factor with the number of ports, so the first 100 steps
/// of up to 98 consecutive jobs have different ports.
const PORTS_PER_JOB: u64 = 101;

/// Whether `PMI_RANK` and `PMI_SIZE` repeat SLURM's task id and task count: srun sets them as well with `--mpi=pmi2`
/// (`MpiDefault=pmi2`), and the variables of MPICH's own launcher are then missing.
pub(super) fn sets_pmi(variables: &EnvVars<'_>) -> bool {
    variables.are_equal("PMI_RANK", "SLURM_PROCID") && variables.are_equal("PMI_SIZE", "SLURM_STEP_NUM_TASKS")
}

/// Returns the number of tasks of the step on the node of this process, if SLURM states it.
pub(super) fn num_local_tasks(variables: &EnvVars<'_>) -> Result<Option<usize>> {
    let node = variables.count("SLURM_NODEID")?.unwrap_or(0);
    Ok(variables.get("SLURM_STEP_TASKS_PER_NODE").and_then(|list| tasks_on(&list, node)))
}

/// Returns the id of the job and, if the process belongs to a step, of the step.
fn job_and_step(variables: &EnvVars<'_>) -> Result<Option<(usize, Option<usize>)>> {
    let Some(job) = variables.count("SLURM_JOB_ID")? else { return Ok(None) };
    let step = match variables.count("SLURM_STEP_ID")? {
        None => variables.count("SLURM_STEPID")?,
        step => step,
    };
    Ok(Some((job, step)))
}

/// Returns the port of a job step, or of the whole job; two steps that run at once have two ports.
pub(super) fn port(variables: &EnvVars<'_>, is_of_step: bool) -> Result<Option<u16>> {
    let at = |(job, step): (usize, Option<usize>)| {
        let step = step.filter(|_| is_of_step).unwrap_or(0);
        let offset = (job as u64 % NUM_PORTS) * PORTS_PER_JOB + step as u64 % NUM_PORTS;
        FIRST_PORT + (offset % NUM_PORTS) as u16
    };
    Ok(job_and_step(variables)?.map(at))
}

/// Returns the id of a run: `JOB.STEP`, as SLURM itself writes a step; empty outside of SLURM.
pub(super) fn run_id(variables: &EnvVars<'_>) -> Result<String> {
    Ok(match job_and_step(variables)? {
        None => String::new(),
        Some((job, None)) => job.to_string(),
        Some((job, Some(step))) => format!("{job}.{step}"),
    })
}

/// Returns the first node of the step.
pub(super) fn first_node_of_step(variables: &EnvVars<'_>) -> Option<String> {
    variables.get("SLURM_STEP_NODELIST").as_deref().and_then(first_node)
}

/// Returns the first node of the job.
pub(super) fn first_node_of_job(variables: &EnvVars<'_>) -> Option<String> {
    variables.get("SLURM_JOB_NODELIST").as_deref().and_then(first_node)
}

/// Whether this process, started by `mpirun` within a job, runs on the job's first node; `None` if the variables do not show it.
///
/// mpirun starts ranks on other nodes through srun, which states the step's nodes and the index of the node among them. Ranks on
/// the node of mpirun itself may inherit the variables of the batch script, which state the node's name alone.
pub(super) fn is_on_first_node_of_job(variables: &EnvVars<'_>) -> Result<Option<bool>> {
    let Some(first) = first_node_of_job(variables) else { return Ok(None) };
    if let Some(first_of_step) = first_node_of_step(variables) {
        let node = variables.count("SLURM_NODEID")?;
        return Ok(node.map(|node| node == 0 && first_of_step == first));
    }
    Ok(variables.get("SLURMD_NODENAME").map(|name| name == first))
}

/// Returns the tasks on a node, of a list like `4(x2),3`.
fn tasks_on(list: &str, node: usize) -> Option<usize> {
    let mut before = 0;
    for part in list.split(',') {
        let (tasks, times) = match part.split_once("(x") {
            None => (part, 1),
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
        };
        before += times;
        if node < before {
            return tasks.trim().parse().ok();
        }
    }
    None
}

/// Returns the first node of a list like `gpu[03-06,9],login1` or `n1,n2`.
fn first_node(list: &str) -> Option<String> {
    let end = list.find(['[', ',']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let Some(rest) = rest.strip_prefix('[') else { return Some(name.to_string()).filter(|n| !n.is_empty()) };
    let (inside, behind) = rest.split_once(']')?;
    let first = inside.split([',', '-']).next()?;
    let behind = behind.split(',').next().unwrap_or_default();
    Some(format!("{name}{first}{behind}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn node_lists_and_task_counts_are_parsed() {
        for (list, first) in [
            ("n1,n2", "n1"),
            ("n7", "n7"),
            ("a[1,3]-x,b", "a1-x"),
            ("a[09-11],b[1-2]", "a09"),
            ("x,a[1-2]", "x"),
        ] {
            assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
        }
        let on = |node| tasks_on("4(x2),3", node);
        assert_eq!([on(0), on(1), on(2), on(3)], [Some(4), Some(4), Some(3), None]);
    }

    #[test]
    fn concurrent_steps_have_different_ports() {
        let mut ports = BTreeSet::new();
        for (job, step) in (9_990..10_088).flat_map(|job| (0..100).map(move |step| (job, step))) {
            let get = |name: &str| match name {
                "SLURM_JOB_ID" => Some(job.to_string()),
                "SLURM_STEPID" => Some(step.to_string()),
                _ => None,
            };
            let port = port(&EnvVars(&get), true).unwrap().unwrap();
            assert!((20_000..30_000).contains(&port));
            assert!(ports.insert(port), "the port of step {step} of job {job} is that of another step");
        }
    }
}
