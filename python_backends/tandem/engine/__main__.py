from tandem.engine.process import main

main()
