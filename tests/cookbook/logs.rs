//! A log for TensorBoard.

use shardgrad::prelude::*;

/// Logs loss, norm and learning rate of each step on rank 0; a resumed run continues the log.
pub(super) fn train(rank: &Rank, model: &Model<Mlp>, x: &Tensor, log: &Log) -> Result<()> {
    let mut optim = AdamW::new(1e-2);
    for step in 1..=3 {
        let tape = model.tape();
        let loss = model.forward(&tape.constant(x.clone())).square().mean();
        loss.backward()?;
        let args = StepArgs { losses: vec![loss.tensor().clone()], ..StepArgs::new(optim.lr()) };
        let report = optim.step(model, tape.gradients(), args)?;
        log.report(rank, step, &report)?; // Or log.scalars(rank, step, &[("loss", loss.item()?)])?.
    }
    Ok(())
}

#[test]
fn log_has_a_line_per_step() {
    let folder = crate::cli::Folder::new("cookbook-logs");
    let log = Log::to(folder.path("run")).unwrap();
    World::run(Mesh::parse("dp=2").unwrap(), |rank| {
        let (model, x) = super::model_and_batch(rank)?;
        train(rank, &model, &x, &log)
    })
    .unwrap();
    drop(log);
    let lines = std::fs::read_to_string(folder.path("run/metrics.jsonl")).unwrap();
    assert_eq!(lines.lines().filter(|line| line.contains("\"loss\":") && line.ends_with('}')).count(), 3);
}
