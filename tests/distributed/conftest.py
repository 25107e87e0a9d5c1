import pytest
import torch.distributed as dist


@pytest.fixture(scope="session")
def pool():
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    from rank_pool import Pool

    pool = Pool()
    yield pool
    pool.close()
