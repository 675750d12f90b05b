//! Inference with a trainer's model, on pipelines too: predictions and metrics during training.

use super::Trainer;
use crate::module::Module;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Result, Tensor, Value};

impl<M: Module> Trainer<'_, M> {
    /// Runs a forward function of the model on arguments that are on the mesh of [`Trainer::rank`], and returns its result on every
    /// rank of that mesh, for every pipeline stage. Dropout is off and no gradient is recorded; the weights are those of the last
    /// step. A collective call: every rank calls it together. Releases the memory of a captured step, which is captured again
    /// later. The results have the same bits on every mesh if those of the steps have ([`Deterministic::Mesh`](super::Deterministic::Mesh)).
    ///
    /// On a pipeline, `forward` is recorded once per call and cut so that each stage reads its own parameters only: it must read the
    /// parameters in the order of the loss, and compute with ops alone.
    ///
    /// ```
    /// use shardgrad_nn::{AdamW, Linear, Plan, Trainer, TrainerConfig};
    /// use shardgrad_tensor::{Elementwise, Mesh, Reduction, Tensor, Value, World};
    /// # fn main() -> shardgrad_tensor::Result<()> {
    /// World::run(Mesh::parse("pp=2")?, |rank| {
    ///     let read = |rank: &_, _, _| Ok(vec![Tensor::from_host(rank, &[2, 1], &[1.0f32, 2.0])?]);
    ///     let loss = |model: &Linear, x: &[_]| model.forward(&x[0]).square().mean();
    ///     let (plan, config) = (Plan::pipeline_parallel("pp"), TrainerConfig::new(2));
    ///     let mut trainer = Trainer::new(rank, Linear::new(1, 3), &plan, AdamW::new(0.1), config, read, loss)?;
    ///     trainer.step()?;
    ///     let x = Tensor::from_host(trainer.rank(), &[1, 1], &[0.5f32])?;
    ///     let class = trainer.infer(&[x], |model, x| model.forward(&x[0]).argmax(1))?;
    ///     assert!((0..3).contains(&class.to_host::<i64>()?[0]));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Errors of ops and collectives; `Kind::Unsupported` on a pipeline if `forward` reads the parameters in another order than the
    /// loss.
    #[doc(alias = "predict")]
    #[doc(alias = "no_grad")]
    #[doc(alias = "inference_mode")]
    #[track_caller]
    pub fn infer(&self, arguments: &[Tensor], forward: impl Fn(&M, &[Var]) -> Var) -> Result<Tensor> {
        let mut results = self.infer_all(arguments, |model, x| vec![forward(model, x)])?;
        Ok(results.swap_remove(0))
    }

    /// [`Trainer::infer`] with several results.
    ///
    /// # Errors
    /// As [`Trainer::infer`].
    #[track_caller]
    pub fn infer_all(
        &self,
        arguments: &[Tensor],
        forward: impl Fn(&M, &[Var]) -> Vec<Var>,
    ) -> Result<Vec<Tensor>> {
        self.capture.clear();
        let _sum_tree = self.set_sum_tree();
        self.model.with_pass_values(|| match &self.pipelined {
            None => {
                let tape = self.model.inference_tape();
                let arguments: Vec<Var> = arguments.iter().map(|t| tape.constant(t.clone())).collect();
                let results = forward(&self.model, &arguments);
                Ok(results.iter().map(|result| result.tensor().clone()).collect())
            }
            Some((pipelined, _)) => {
                pipelined.infer(&self.model, arguments, &|arguments| Ok(forward(&self.model, arguments)))
            }
        })
    }
}
