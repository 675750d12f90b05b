//! An own plan.

use shardgrad::prelude::*;

/// Rows over dp, hidden units over tp, and parameters with their optimizer state over dp (ZeRO 3).
pub(super) fn plan() -> Plan {
    Plan::data_parallel("dp")
        .and(Plan::tensor_parallel("tp").column_parallel("c_fc").row_parallel("c_proj"))
        // Sequence parallelism: the partial sums of the second layer become shards of rows, not copies.
        .point("c_proj.out", "tp@0")
        // The first dim that has rows for every rank; parameters without one are copies.
        .store("*", "dp@0|@1|=")
}

#[test]
fn plan_states_the_layouts() {
    super::on_meshes_with(&["tp=2", "dp=2,tp=2"], |rank| {
        let model = Model::with_dtype(rank, Mlp::new(4, 8), &plan(), 1, DType::F64)?;
        let x = Tensor::normal(rank, &plan().batch_layout(rank.mesh(), DType::F64, &[8, 4])?, 7, 0, 1.0)?;
        let y = model.forward(&model.tape().constant(x));
        match rank.mesh().to_string().as_str() {
            "mesh(dp=2,tp=2)" => {
                assert_eq!(model.param("c_proj.weight")?.layout().to_string(), "f64[8@dp@tp, 4]");
                assert_eq!(y.layout().to_string(), "f64[8@dp@tp, 4]");
            }
            "mesh(tp=2)" => assert_eq!(y.layout().to_string(), "f64[8@tp, 4]"),
            _ => {}
        }
        y.tensor().to_f64()
    });
}
