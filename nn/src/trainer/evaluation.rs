//! Forward passes of a trainer's model without an update: the loss of an evaluation, the layouts of activations.

use super::Trainer;
use super::row_leaves::{RowLeaves, complete_outputs};
use crate::loss::PartialLoss;
use crate::module::Module;
use shardgrad_autograd::{OpRecord, Program, Var};
use shardgrad_tensor::{Layout, Result, Tensor, Value};
use std::rc::Rc;

impl<M: Module> Trainer<'_, M> {
    /// Evaluates this rank's partial loss on arguments that are on the mesh of [`Trainer::rank`]. The sums over all
    /// ranks ([`world_sum`](shardgrad_tensor::training_step::control::world_sum)) give the loss. Dropout is off and no
    /// gradient is recorded. Releases the memory of a captured step, which is captured again later.
    ///
    /// # Errors
    /// Errors of ops and collectives.
    #[doc(alias = "no_grad")]
    #[doc(alias = "evaluate")]
    #[doc(alias = "eval")]
    pub fn partial_loss(&self, arguments: &[Tensor]) -> Result<PartialLoss> {
        self.capture.clear();
        let _sum_tree = self.set_sum_tree();
        let outputs = self.model.with_pass_values(|| match &self.pipelined {
            None => {
                let tape = self.model.inference_tape();
                let arguments: Vec<Var> = arguments.iter().map(|t| tape.constant(t.clone())).collect();
                let scalars = (self.loss_fn)(&self.model, &arguments).into_scalars();
                Ok(scalars.iter().map(|scalar| Some(scalar.tensor().clone())).collect::<Vec<_>>())
            }
            Some((pipelined, form)) => {
                let forward = |arguments: &[Var]| Ok(self.loss_vars(arguments));
                let mut outputs = pipelined.forward_step(&self.model, arguments, &forward)?;
                outputs.truncate(form.num_scalars());
                Ok(outputs)
            }
        })?;
        let outputs = match self.leaves {
            Some(_) => complete_outputs(&[outputs], self.site)?.concat(),
            None => outputs,
        };
        let partial = PartialLoss::from_scalars(&outputs)?;
        // Ranks along the axes of the leaves hold the same arguments, and one of them counts.
        let counts = self.leaves.as_ref().is_none_or(RowLeaves::is_first_rank);
        Ok(if counts { partial } else { PartialLoss { sum: 0.0, count: partial.count.map(|_| 0.0) } })
    }

    /// Returns the path in the model and the layout of the first result of each op of this rank in a forward pass, in
    /// order. Computes nothing.
    ///
    /// # Errors
    /// Errors of `load_batch` and of the model.
    pub fn forward_layouts(&self) -> Result<Vec<(Rc<str>, Layout)>> {
        let path_and_layout = |r: &OpRecord| Some((r.path.clone(), r.outputs.first()?.clone()));
        if let Some((pipelined, _)) = &self.pipelined {
            return Ok(pipelined.records(self.rank()).iter().filter_map(path_and_layout).collect());
        }
        let _sum_tree = self.set_sum_tree();
        let layouts: Vec<Layout> = self.load_microbatch(0)?.iter().map(|t| t.layout().clone()).collect();
        let forward = |arguments: &[Var]| Ok(self.loss_vars(arguments));
        let program = Program::record(self.rank(), &layouts, None, forward)?;
        Ok(program.records.iter().filter_map(path_and_layout).collect())
    }
}
